"""Engine folders with FP8 weights: made of FP8 checkpoints, and of floats."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.unit.builder.test_layouts import _in_memory
from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun
from tests.unit.worker.quantization import checkpoints, integer_checkpoints
from trimaran.kernels.torch_ops import TorchOps
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.models.interfaces import StageRange
from trimaran.worker.models.registry import build_model
from trimaran.worker.models.weights.weight_loader import load_shard
from trimaran.worker.parallel.tensor_parallel import ShardPosition

CONFIG = models.llama_config(hidden_size=72, intermediate_size=104, head_dim=12)
LAYOUTS = ["--tp-size 1", "--tp-size 3", "--tp-size 2 --pp-size 2"]


def _bytes_of(tensors):
    return {name: each.contiguous().view(torch.uint8) for name, each in tensors.items()}


def _check_shards(built, source):
    """The tensors of a built folder are those that ranks cut from its source."""
    for rank, path in enumerate(built.weight_files):
        mine, expected = _bytes_of(load_file(path)), _bytes_of(_in_memory(source, rank, built))
        assert mine.keys() == expected.keys()
        assert all(mine[key].equal(expected[key]) for key in mine), rank


def _build(trimaran, source, output, *flags):
    done = trimaran("build", "--checkpoint", source, "--output", output, *flags)
    assert done.code == 0, done.err
    return EngineFolder.load(output)


@pytest.mark.matrix(keep=12)
@pytest.mark.parametrize("flags", LAYOUTS)
@pytest.mark.parametrize("form", list(checkpoints.FORMATS))
def test_a_built_file_equals_the_shard_that_a_rank_cuts_from_the_checkpoint(
    form, flags, tmp_path, trimaran
):
    folder = checkpoints.make(tmp_path, form, CONFIG)
    source = EngineFolder.load(folder)
    built = _build(trimaran, folder, tmp_path / "engine", *flags.split())
    _check_shards(built, source)


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "int8", "int4_g32"])
def test_weights_quantized_by_a_build_are_those_quantized_by_a_load(name, tmp_path, trimaran):
    models.save_huggingface(tmp_path / "floats", CONFIG)
    source = EngineFolder.load(tmp_path / "floats").quantized(name)
    flags = ("--tp-size", 2, "--quantization", name)
    built = _build(trimaran, tmp_path / "floats", tmp_path / "engine", *flags)
    _check_shards(built, source)
    again = built.config.quantization
    assert again is not None and again.rules == source.config.quantization.rules
    assert again.head_bits == source.config.quantization.head_bits


@torch.inference_mode()
def test_a_built_folder_gives_the_logits_of_its_checkpoint(tmp_path, trimaran):
    folder = checkpoints.make(tmp_path, "fp8-blocks", CONFIG)
    built = _build(trimaran, folder, tmp_path / "engine")
    ops = TorchOps()
    stage = StageRange.of(built.config.num_hidden_layers, 0, 1)
    ours = build_model(
        built.config, stage, ShardPosition(), dtype=torch.float32, device=models.CPU, ops=ops
    )
    load_shard(ours, built.shard_of(0))
    ours.process_weights_after_loading()
    (prompt,) = models.prompts(30)

    logits = PagedRun(ours, 1).logits({0: prompt})

    assert logits.equal(PagedRun(models.load_ours(folder, ops=ops), 1).logits({0: prompt}))


def test_folders_of_versions_that_knew_fp8_alone_are_read(tmp_path, trimaran):
    folder = checkpoints.make(tmp_path, "fp8-blocks", CONFIG)
    built = _build(trimaran, folder, tmp_path / "engine")

    def without_new_keys(section):
        del section["head_bits"]
        for rule in section["rules"]:
            del rule["scheme"]["kind"]

    path = built.path / "config.json"
    values = json.loads(path.read_text())
    without_new_keys(values["pretrained_config"]["quantization"])
    del values["shards"]
    path.write_text(json.dumps(values))
    (file,) = built.weight_files
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    origin = json.loads(metadata["origin"])
    without_new_keys(origin["quantization"])
    save_file(load_file(file), file, {**metadata, "origin": json.dumps(origin)})

    assert EngineFolder.load(built.path).config.quantization == built.config.quantization


def test_floats_beside_a_quantized_cache_are_quantized_as_they_are_loaded(llama, trimaran):
    checkpoint = llama()
    section = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    checkpoint.edit_config(quantization_config=section)

    folder = EngineFolder.load(checkpoint.folder).quantized("int8")

    assert folder.config.kv_cache_quant_algo == "FP8"
    assert folder.config.quantization.has_integers
    done = trimaran(
        "quantize", "--checkpoint", checkpoint.folder, "--output", checkpoint.folder / "out"
    )
    assert done.code == 2 and "asks for a KV cache of FP8" in done.err


def test_weight_only_flags_without_effect_are_named(llama, trimaran, tmp_path):
    done = trimaran(
        "build", "--checkpoint", llama().folder, "--output", tmp_path / "out",
        "--weight_only_precision", "int4",
    )  # fmt: skip
    assert done.code == 0
    assert "accepted without effect: --weight_only_precision" in done.err
    assert EngineFolder.load(tmp_path / "out").config.quantization is None


def test_the_quantization_config_of_an_engine_folder_names_the_algorithm_of_tensorrt_llm(
    tmp_path, trimaran
):
    folder = checkpoints.make(tmp_path, "modelopt-static", CONFIG)
    _build(trimaran, folder, tmp_path / "engine")
    values = json.loads((tmp_path / "engine" / "config.json").read_text())
    section = values["pretrained_config"]["quantization"]
    assert section["quant_algo"] == "FP8"
    assert section["exclude_modules"] == ["lm_head", "model.layers.1.self_attn*"]


def test_flags_of_the_converter_of_tensorrt_llm_quantize(llama, trimaran, tmp_path):
    for flag in ("--use_fp8", "--use-fp8-rowwise"):
        built = _build(trimaran, llama().folder if flag == "--use_fp8" else tmp_path / "llama",
                       tmp_path / flag, flag)  # fmt: skip
        assert load_file(built.weight_files[0])["layers.0.mlp.down_proj.weight"].dtype == (
            torch.float8_e4m3fn
        )


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ((), "int8"),
        (("--weight_only_precision", "int4", "--per_group", "--group_size", 32), "int4_g32"),
    ],
)
def test_weight_only_flags_name_a_quantization(flags, name, llama, trimaran, tmp_path):
    built = _build(trimaran, llama().folder, tmp_path / "out", "--use_weight_only", *flags)
    expected = EngineFolder.load(tmp_path / "llama").quantized(name).config.quantization
    assert built.config.quantization.rules == expected.rules


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--weight_only_precision", "int4_awq"), "in the format awq as --checkpoint"),
        (("--weight_only_precision", "int2"), "must be one of int8, int4"),
        (("--group_size", 48, "--weight_only_precision", "int4"), "have 32, 64 or 128"),
        (("--per_group",), "int8 has a scale a row"),
        (("--quantization", "fp8"), "means --quantization int8, but --quantization is fp8"),
    ],
)
def test_weight_only_flags_that_ask_for_other_weights_are_refused(flags, words, llama, refused):
    assert words in refused(llama().folder, "--use_weight_only", *flags)


@pytest.mark.parametrize("command", ["build", "convert"])
@pytest.mark.parametrize("names_file", [False, True])
def test_quant_ckpt_path_names_the_weights_of_the_model(
    command, names_file, tmp_path, trimaran
):
    folder = integer_checkpoints.make(tmp_path, integer_checkpoints.FORMS["gptq"], CONFIG)
    path = folder / "model.safetensors" if names_file else folder
    done = trimaran(
        command, "--checkpoint", tmp_path / "floats", "--output", tmp_path / "out",
        "--use_weight_only", "--weight_only_precision", "int4_gptq", "--quant_ckpt_path", path,
    )  # fmt: skip
    assert done.code == 0, done.err
    _check_shards(EngineFolder.load(tmp_path / "out"), EngineFolder.load(folder))


def test_quantized_weights_of_no_or_another_model_are_refused(tmp_path, llama, refused):
    folder = integer_checkpoints.make(tmp_path, integer_checkpoints.FORMS["gptq"], CONFIG)
    error = refused(llama().folder, "--quant_ckpt_path", folder)
    assert "hidden_size is 72, but 32 in" in error
    error = refused(tmp_path / "floats", "--quant_ckpt_path", tmp_path / "floats")
    assert "describes no quantized weights" in error
    save_file({"a": torch.zeros(1)}, folder / "b.safetensors")
    error = refused(tmp_path / "floats", "--quant_ckpt_path", folder / "b.safetensors")
    assert "holds other weights too. Name the folder" in error


def test_quantized_weights_are_not_quantized_again(tmp_path, refused):
    folder = checkpoints.make(tmp_path, "fbgemm", CONFIG)
    error = refused(folder, "--quantization", "fp8_block")
    assert "--quantization is fp8_block but the weights of" in error
    assert "(fbgemm_fp8: FP8_PER_CHANNEL_PER_TOKEN)" in error


def test_blocks_that_span_two_stacked_matrices_are_refused(gpt2, refused):
    error = refused(gpt2().folder, "--quantization", "fp8_block")
    assert "blocks of 128 rows, but one matrix begins at row 32" in error


def test_a_family_that_stores_matrices_transposed_is_quantized(gpt2, trimaran, tmp_path):
    checkpoint = gpt2(dtype="float32")
    built = _build(trimaran, checkpoint.folder, tmp_path / "out", "--quantization", "fp8")
    tensors = load_file(built.weight_files[0])
    layer = "layers.0.mlp.up_proj"
    floats = checkpoint.tensors["transformer.h.0.mlp.c_fc.weight"].t()
    scales = tensors[f"{layer}.weight_scale"].reshape(-1, 1)
    distance = tensors[f"{layer}.weight"].float() * scales - floats
    assert distance.abs().max() <= 2**-4 * floats.abs().max()


@pytest.mark.parametrize("flags", ["--tp-size 3", "--tp-size 2 --moe-ep-size 2 --pp-size 2"])
@pytest.mark.parametrize("form", ["fp8-blocks", "fp8-tensor-static"])
def test_built_experts_are_those_that_a_rank_cuts_from_the_checkpoint(
    form, flags, tmp_path, trimaran
):
    folder = checkpoints.make(tmp_path, form, models.expert_configs()["qwen3-moe"])
    source = EngineFolder.load(folder)
    built = _build(trimaran, folder, tmp_path / "engine", *flags.split())
    for rank, path in enumerate(built.weight_files):
        mine, expected = _bytes_of(load_file(path)), _bytes_of(_in_memory(source, rank, built))
        assert "layers.0.mlp.experts.gate_up_weight_scale" in mine or rank
        assert mine.keys() == expected.keys()
        assert all(mine[key].equal(expected[key]) for key in mine), rank


@pytest.mark.matrix(keep=6)
@pytest.mark.parametrize("flags", LAYOUTS[1:2])
@pytest.mark.parametrize("form", list(integer_checkpoints.FORMS))
def test_a_built_file_of_integers_equals_the_shard_that_a_rank_cuts_from_the_checkpoint(
    form, flags, tmp_path, trimaran
):
    folder = integer_checkpoints.make(tmp_path, integer_checkpoints.FORMS[form], CONFIG)
    built = _build(trimaran, folder, tmp_path / "engine", *flags.split())
    _check_shards(built, EngineFolder.load(folder))


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize("form", ["gptq-desc-act", "packed-8-bits", "awq"])
def test_built_experts_of_integers_are_those_that_a_rank_cuts_from_the_checkpoint(
    form, tmp_path, trimaran
):
    config = models.expert_configs()["qwen3-moe"]
    folder = integer_checkpoints.make(tmp_path, integer_checkpoints.FORMS[form], config)
    flags = ("--tp-size", 2, "--moe-ep-size", 2, "--pp-size", 2)
    _check_shards(
        _build(trimaran, folder, tmp_path / "engine", *flags), EngineFolder.load(folder)
    )
