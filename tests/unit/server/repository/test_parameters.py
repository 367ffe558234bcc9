"""Parameters: strict parsing, refusals, and logged parameters without effect."""

from __future__ import annotations

import logging

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.server.repository.config_pbtxt import ModelParameters
from trimaran.server.repository.model_repository import ModelRepository
from trimaran.server.repository.parameter_table import TOKEN_PARAMETERS


def refusal(root) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelRepository.load(root)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("True", True), ("true", True), ("TRUE", True), ("1", True), ("False", False),
     ("false", False), ("FALSE", False), ("0", False), ("", None), ("${x}", None),
     ("$x", None)],
)  # fmt: skip
def test_a_boolean_has_eight_spellings(tmp_path, text, value):
    assert ModelParameters({"k": text}, tmp_path / "c").get_bool("k") is value


@pytest.mark.parametrize("text", ["yes", "tRue", "on", "2", "t"])
def test_other_spellings_of_a_boolean_are_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=rf"c: parameter 'k' is '{text}' but must be True or"):
        ModelParameters({"k": text}, tmp_path / "c").get_bool("k")


@pytest.mark.parametrize("text", ["0x10", "1e3", "1.0", "many", "1_000"])
def test_integers_are_plain_decimal(tmp_path, text):
    with pytest.raises(ConfigError, match="must be an integer"):
        ModelParameters({"k": text}, tmp_path / "c").get_int("k")


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("batching_strategy", "inflight", "Invalid gpt_model_type. Must be v1/inflight"),
        ("batch_scheduler_policy", "fifo", "'fifo' but must be one of max_utilization, "),
        ("batch_scheduler_policy", "a-b.Policy", "or the import path of a class (package."),
        ("max_tokens_in_paged_kv_cache", "lots", "'lots' but must be an integer"),
        ("max_tokens_in_paged_kv_cache", "0", "is 0 but must be at least 1"),
        ("kv_cache_free_gpu_mem_fraction", "most", "'most' but must be a number"),
        ("enable_chunked_context", "maybe", "'maybe' but must be True or False"),
        ("max_beam_width", "0", "is 0 but must be at least 1"),
        ("decoding_mode", "topk", "'topk' but must be one of auto, top_k"),
        ("encoder_engine_dir", "/e", "'/e', but encoder-decoder models are not served"),
        ("lora_cache_max_adapter_size", "0", "is 0 but must be at least 1"),
        ("lora_cache_gpu_memory_fraction", "1.5", "is 1.5 but must be at least 0 and at"),
        ("lora_cache_host_memory_bytes", "-1", "is -1 but must be at least 0"),
        ("lora_cache_host_memory_bytes", str(1 << 63), "but must be an integer of at most 64"),
        ("guided_decoding_backend", "outlines", "'outlines' but must be one of xgrammar"),
        ("gpu_weights_percent", "0.5", "Leave it unset (or set it to 1)."),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_served_is_refused_by_file_key_and_value(
    write_repository, key, value, complaint
):
    message = refusal(write_repository(**{key: value}))

    assert "/tensorrt_llm/config.pbtxt: " in message
    assert complaint in message


@pytest.mark.parametrize(
    "values",
    [{"max_beam_width": "4"}, {"decoding_mode": "beam_search"}, {"sink_token_length": "0"},
     {"kv_cache_host_memory_bytes": "0"}, {"num_nodes": "1"}, {"batching_strategy": "V1"},
     {"speculative_decoding_fast_logits": "False"}, {"gpu_weights_percent": "1.0"}],
)  # fmt: skip
def test_values_equal_to_the_default_behaviour_are_accepted(write_repository, values):
    assert "tensorrt_llm" in ModelRepository.load(write_repository(**values)).models


def test_a_parameter_without_effect_is_logged_with_the_reason(write_repository, caplog):
    with caplog.at_level(logging.INFO):
        ModelRepository.load(write_repository(multi_block_mode="True"))

    lines = [line for line in caplog.messages if "multi_block_mode" in line]
    assert len(lines) == 1
    assert lines[0].endswith(
        "'multi_block_mode' = True is accepted without effect: it tunes TensorRT, which is not "
        "used here"
    )


def test_an_unknown_key_is_ignored_with_a_suggestion(write_repository, edit, caplog):
    root = write_repository()
    edit(
        root / "tensorrt_llm" / "config.pbtxt", 'key: "max_beam_width"', 'key: "max_beam_with"'
    )

    with caplog.at_level(logging.WARNING):
        ModelRepository.load(root)

    assert (
        "parameter 'max_beam_with' is not known and is ignored; did you mean 'max_beam_width'?"
    ) in caplog.text


@pytest.mark.parametrize("name", ["worker_path", "executor_worker_path"])
def test_the_ignored_worker_path_is_logged_under_both_names(write_repository, caplog, name):
    root = write_repository()
    path = root / "tensorrt_llm" / "config.pbtxt"
    path.write_text(path.read_text() + f'parameters {{ key: "{name}" '
                    'value { string_value: "/w" } }\n')  # fmt: skip

    with caplog.at_level(logging.INFO):
        ModelRepository.load(root)

    assert any(
        f"'{name}' = /w is accepted without effect: ranks run the program trimaran-rank" in line
        for line in caplog.messages
    )


@pytest.mark.feature("parameter:tokenizer_dir", of="postprocessing")
@pytest.mark.feature("parameter:tokenizer_dir", of="preprocessing")
@pytest.mark.parametrize("model", ["preprocessing", "postprocessing"])
def test_a_text_model_needs_its_tokenizer(write_repository, edit, model):
    root = write_repository()
    path = root / model / "config.pbtxt"
    edit(path, 'string_value: "/tokenizer"', 'string_value: "${tokenizer_dir}"')

    assert refusal(root) == (
        f"{path}: parameter 'tokenizer_dir' is not set. Fill it: trimaran fill-template -i "
        f"{path} tokenizer_dir:VALUE"
    )


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"add_special_tokens": "maybe"}, "'maybe' but must be true, false, yes, no"),
        ({"accumulate_tokens": "2"}, "parameter 'accumulate_tokens' is '2'"),
        ({"multimodal_model_path": "/m"}, "multimodal models are not served"),
    ],
)
def test_text_models_refuse_unsupported_parameters(write_repository, values, complaint):
    assert complaint in refusal(write_repository(**values))


def test_the_older_name_of_the_multimodal_models_folder_is_known(write_repository, caplog):
    root = write_repository()
    path = root / "preprocessing" / "config.pbtxt"
    old = path.read_text().replace("multimodal_model_path", "visual_model_path")
    path.write_text(old.replace('"${visual_model_path}"', '"/m"'))
    assert "'visual_model_path' is '/m', but multimodal models" in refusal(root)
    path.write_text(old)
    ModelRepository.load(root)
    assert "not known" not in caplog.text


def test_the_table_covers_every_parameter_of_the_template(write_repository):
    parameters = ModelRepository.load(write_repository()).models["tensorrt_llm"].parameters

    assert set(parameters.names) <= set(TOKEN_PARAMETERS)
