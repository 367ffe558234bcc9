"""The filled templates are the five models of Triton's TensorRT-LLM backend."""

from __future__ import annotations

import pytest
from tritonclient.grpc.model_config_pb2 import DataType

from trimaran.server.repository.model_repository import ModelRepository, Role, load_model
from trimaran.server.repository.signatures import backend_minor

ROLES = {
    "ensemble": Role.ENSEMBLE,
    "preprocessing": Role.PREPROCESSING,
    "tensorrt_llm": Role.TOKEN,
    "postprocessing": Role.POSTPROCESSING,
    "tensorrt_llm_bls": Role.BLS,
}


def tensors(side):
    return {
        t.name: (DataType.Name(t.data_type), list(t.dims), getattr(t, "optional", False))
        for t in side
    }


@pytest.mark.feature("setting:triton_max_batch_size", of="request")
def test_every_filled_template_parses_and_has_its_role(write_repository):
    models = ModelRepository.load(write_repository()).models

    assert {name: model.role for name, model in models.items()} == ROLES
    assert all(model.versions == (1,) for model in models.values())
    assert all(model.config.max_batch_size == 8 for model in models.values())


@pytest.mark.feature("setting:decoupled_mode", of="request")
@pytest.mark.parametrize("decoupled", ["True", "False"])
def test_decoupled_mode_reaches_the_token_and_the_bls_model(write_repository, decoupled):
    models = ModelRepository.load(write_repository(decoupled_mode=decoupled)).models

    for name in ("tensorrt_llm", "tensorrt_llm_bls"):
        policy = models[name].config.model_transaction_policy
        assert policy.decoupled is (decoupled == "True")
    assert not models["ensemble"].config.HasField("model_transaction_policy")


def test_the_token_model_has_its_documented_tensors(write_repository):
    config = ModelRepository.load(write_repository()).models["tensorrt_llm"].config
    inputs, outputs = tensors(config.input), tensors(config.output)

    assert inputs["input_ids"] == ("TYPE_INT32", [-1], True)
    assert inputs["input_lengths"] == ("TYPE_INT32", [1], False)
    assert inputs["request_output_len"] == ("TYPE_INT32", [1], False)
    assert inputs["stop_words_list"] == ("TYPE_INT32", [2, -1], True)
    assert inputs["lora_config"] == ("TYPE_INT32", [-1, 3], True)
    assert inputs["stop"] == ("TYPE_BOOL", [1], True)
    assert outputs["output_ids"] == ("TYPE_INT32", [-1, -1], False)
    assert outputs["generation_logits"] == ("TYPE_FP32", [-1, -1, -1], False)
    by_name = {tensor.name: tensor for tensor in config.input}
    assert by_name["temperature"].HasField("reshape")
    assert by_name["input_ids"].allow_ragged_batch


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm", "tensorrt_llm_bls"])
def test_renamed_tensors_are_declared_under_both_names(write_repository, model):
    config = ModelRepository.load(write_repository()).models[model].config
    inputs = tensors(config.input)

    assert inputs["min_length"] == inputs["min_tokens"]
    assert inputs["random_seed"] == inputs["seed"]
    assert inputs["seed"][0] == "TYPE_UINT64"
    assert inputs["return_perf_metrics"] == inputs["return_kv_cache_reuse_stats"]


def test_the_ensemble_and_the_bls_model_answer_with_the_same_outputs(write_repository):
    models = ModelRepository.load(write_repository()).models

    assert tensors(models["ensemble"].config.output) == tensors(
        models["tensorrt_llm_bls"].config.output
    )
    ensemble_inputs = tensors(models["ensemble"].config.input)
    bls_inputs = tensors(models["tensorrt_llm_bls"].config.input)
    assert set(ensemble_inputs) <= set(bls_inputs)
    assert set(bls_inputs) - set(ensemble_inputs) == {
        "image_input", "image_bytes_input", "video_bytes_input", "image_url_input",
        "num_draft_tokens", "use_draft_logits",
    }  # fmt: skip


def test_unfilled_placeholders_of_optional_values_are_not_set(write_repository):
    parameters = ModelRepository.load(write_repository()).models["tensorrt_llm"].parameters

    assert parameters.get_str("gpt_model_path") == "/engine"
    assert parameters.get_int("max_beam_width") is None
    assert parameters.get_bool("enable_kv_cache_reuse") is None
    assert parameters.get_float("kv_cache_free_gpu_mem_fraction") is None
    assert parameters.get_str("gpu_device_ids") is None


def test_a_copy_of_the_token_model_under_another_name_is_a_token_model(write_repository, edit):
    root = write_repository()
    copy = root / "tensorrt_llm_2"
    (copy / "1").mkdir(parents=True)
    text = (root / "tensorrt_llm" / "config.pbtxt").read_text()
    (copy / "config.pbtxt").write_text(text.replace('name: "tensorrt_llm"\n', "", 1))

    repository = ModelRepository.load(root)

    assert [model.name for model in repository.of_role(Role.TOKEN)] == [
        "tensorrt_llm", "tensorrt_llm_2",
    ]  # fmt: skip
    assert repository.models["tensorrt_llm_2"].config.name == "tensorrt_llm_2"


@pytest.mark.parametrize(
    ("script", "minor"),
    [("", 18), ('{"request_type": "active"}', 17),
     ('{"request_type": "active"}, {"request_type": "waiting"}', 18)],
    ids=["none", "without waiting requests", "with waiting requests"],
)  # fmt: skip
def test_a_script_tells_versions_0_17_and_0_18_apart(write_repository, script, minor):
    folder = write_repository() / "tensorrt_llm"
    model = load_model(folder)
    version = folder / "1"
    if script:
        (version / "model.py").write_text(script)

    assert backend_minor(model.config, version) == minor
