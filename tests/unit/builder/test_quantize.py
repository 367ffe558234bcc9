"""`trimaran quantize`: folders that load as what a load would have quantized itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun
from trimaran.comm.tokenizers.prepare import prepare
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.models.interfaces import StageRange
from trimaran.worker.models.quantized_layers import finish_weights
from trimaran.worker.models.registry import build_model
from trimaran.worker.models.weights.weight_loader import load_checkpoint
from trimaran.worker.parallel.tensor_parallel import ShardPosition

TEXT = (
    "It was a cold morning, and the road to the village was white with frost. The old man who "
    "kept the gate came out with a lantern in his hand, and asked us where we were going. "
    "We told him that we had come a long way, and that we hoped to be home before dark. "
) * 2
CONFIG = models.llama_config(hidden_size=96, intermediate_size=160, head_dim=32)
NUMBERS = {
    "fp8": "FP8", "fp8_block": "FP8", "int8": "INT8", "w8a8_int8": "INT8", "int4_g32": "INT4",
}  # fmt: skip


def parameters(folder: EngineFolder):
    stage = StageRange.of(folder.config.num_hidden_layers, 0, 1)
    model = build_model(
        folder.config, stage, ShardPosition(), dtype=torch.bfloat16, device=models.CPU
    )
    load_checkpoint(model, folder.weight_files)
    return {name: each.view(torch.uint8) for name, each in model.named_parameters()}


@pytest.mark.parametrize("file_size", ["5GB", "50KB"])
@pytest.mark.parametrize("name", list(NUMBERS))
def test_a_quantized_folder_loads_as_its_source_quantized_by_a_load(
    name, file_size, tmp_path, trimaran
):
    source = tmp_path / "floats"
    models.save_huggingface(source, CONFIG, dtype=torch.bfloat16, file_size=file_size)
    (source / "tokenizer.json").write_text("{}")

    done = trimaran(
        "quantize", "--checkpoint", source, "--output", tmp_path / "out", "--quantization", name
    )

    assert done.code == 0, done.err
    assert f"21 weights in {NUMBERS[name]}" in done.out
    found = parameters(EngineFolder.load(tmp_path / "out"))
    expected = parameters(EngineFolder.load(source).quantized(name))
    assert found.keys() == expected.keys()
    assert all(found[key].equal(expected[key]) for key in found)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "int8"])
def test_a_folder_with_quantized_experts_loads_as_its_source_quantized_by_a_load(
    name, tmp_path, trimaran
):
    source, config = tmp_path / "floats", models.expert_configs()["qwen3-moe"]
    models.save_huggingface(source, config, dtype=torch.bfloat16)

    done = trimaran(
        "quantize", "--checkpoint", source, "--output", tmp_path / "out", "--quantization", name
    )

    assert done.code == 0, done.err
    found = parameters(EngineFolder.load(tmp_path / "out"))
    expected = parameters(EngineFolder.load(source).quantized(name))
    assert "layers.0.mlp.experts.down_weight_scale" in found
    assert found.keys() == expected.keys()
    assert all(found[key].equal(expected[key]) for key in found)


def test_a_text_without_effect_on_int8_inputs_is_refused(tmp_path, trimaran):
    models.save_huggingface(tmp_path / "floats", CONFIG, dtype=torch.bfloat16)
    flags = ("--quantization", "w8a8_int8", "--calib", tmp_path / "text")
    words = ("quantize", "--checkpoint", tmp_path / "floats", "--output", tmp_path / "out")
    done = trimaran(*words, *flags)
    assert done.code == 2 and "Name --qformat int8_sq" in done.err


def test_quantized_values_times_scales_equal_the_floats(tmp_path, trimaran):
    source = tmp_path / "floats"
    models.save_huggingface(source, CONFIG, dtype=torch.bfloat16)
    flags = ("--quantization", "fp8_block")
    trimaran("quantize", "--checkpoint", source, "--output", tmp_path / "out", *flags)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    floats = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    assert tensors[name].dtype == torch.float8_e4m3fn
    assert tensors[f"{name}_scale_inv"].shape == (1, 2)
    scales = tensors[f"{name}_scale_inv"].repeat_interleave(128, 1)[:, :160]
    found = tensors[name].float() * scales
    # Half of the distance of two FP8 numbers: of normal numbers, and of numbers near zero.
    torch.testing.assert_close(found, floats[name].float(), atol=1e-3, rtol=2**-4)


def test_the_quantization_config_names_unquantized_modules(tmp_path, trimaran):
    source = tmp_path / "floats"
    models.save_huggingface(source, CONFIG, dtype=torch.bfloat16)
    trimaran("quantize", "--checkpoint", source, "--output", tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert values["quant_method"] == "compressed-tensors"
    assert values["ignore"] == ["lm_head", "model.embed_tokens"]
    weights = values["config_groups"]["group_0"]["weights"]
    assert (weights["strategy"], weights["type"], weights["num_bits"]) == (
        "channel",
        "float",
        8,
    )


def test_models_that_cannot_be_quantized_are_refused(gpt2, llama, trimaran, tmp_path):
    words = ("quantize", "--output", tmp_path / "out", "--checkpoint")
    done = trimaran(*words, gpt2().folder)
    assert done.code == 2 and "[in, out]" in done.err
    (tmp_path / "out").mkdir()
    done = trimaran(*words, llama().folder)
    assert done.code == 2 and "exists already" in done.err
    (tmp_path / "out").rmdir()
    assert trimaran(*words, tmp_path / "llama").code == 0
    again = tmp_path / "again"
    done = trimaran("quantize", "--output", again, "--checkpoint", tmp_path / "out")
    assert done.code == 2 and "quantized already (compressed-tensors" in done.err
    assert not again.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--qformat", "int4_awq"), "fitted to a text. Add --calib FILE"),
        (("--qformat", "nvfp4"), "Made are fp8, int8_wo, int4_wo, int4_awq, int8_sq"),
        (("--calib_size", "2"), "--calib_size counts sequences of a text. Add --calib FILE"),
        (("--auto_quantize_bits", "10"), "compares predictions of a text. Add --calib FILE"),
        (("--calib", "missing.txt"), "holds no tokenizer for the text"),
        (
            ("--qformat", "int8_wo", "--quantization", "int4_g32"),
            "--qformat int8_wo means --quantization int8, but --quantization is int4_g32",
        ),
        (("--quantization", "int4"), "inputs, which groups of 128 do not divide"),
    ],
)
def test_integers_that_no_folder_holds_are_refused(flags, words, tmp_path, trimaran):
    models.save_huggingface(tmp_path / "floats", CONFIG, dtype=torch.bfloat16)
    output = tmp_path / "out"
    done = trimaran("quantize", "--checkpoint", tmp_path / "floats", "--output", output, *flags)
    assert done.code == 2 and words in done.err
    assert not output.exists()


@pytest.fixture
def trained():
    """A small trained model with a tokenizer."""
    return Path(__file__).parents[3] / "examples" / "demo_models" / "draft"


def logits(folder, ids):
    """The logits of a folder's model for a text's tokens."""
    source = EngineFolder.load(folder)
    stage = StageRange.of(source.config.num_hidden_layers, 0, 1)
    model = build_model(
        source.config, stage, ShardPosition(), dtype=torch.bfloat16, device=models.CPU
    )
    load_checkpoint(model, source.weight_files)
    finish_weights(model)
    run = PagedRun(model, 1, max_len=len(ids))
    with torch.inference_mode():
        return model.compute_logits(run.hidden({0: ids})).float()


@pytest.mark.parametrize("flags", [("--quantization", "int4_g32"), ("--qformat", "fp8")])
def test_weights_that_are_fitted_to_a_text_change_its_logits_less(
    flags, trained, tmp_path, trimaran
):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    words = ("quantize", "--checkpoint", trained, "--output")

    trimaran(*words, tmp_path / "plain", *flags)
    done = trimaran(*words, tmp_path / "fitted", *flags, "--calib", text, "--calib_size", "1")

    assert done.code == 0, done.err
    configs = [
        json.loads((tmp_path / name / "config.json").read_text())
        for name in ("plain", "fitted")
    ]
    assert configs[0] == configs[1]
    ids = prepare(trained).fast().encode(TEXT).ids[:128]
    floats = logits(trained, ids)
    errors = [
        float((logits(tmp_path / name, ids) - floats).square().mean())
        for name in ("plain", "fitted")
    ]
    assert errors[1] < 0.8 * errors[0]


def test_sensitive_layers_stay_floats_up_to_the_bits_that_are_named(
    trained, tmp_path, trimaran
):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    ids = prepare(trained).fast().encode(TEXT).ids[:128]
    floats = logits(trained, ids)
    errors = []
    for bits in ((), ("--auto_quantize_bits", "10"), ("--auto_quantize_bits", "14")):
        output = tmp_path / f"out{len(errors)}"
        done = trimaran(
            "quantize", "--checkpoint", trained, "--output", output, "--calib", text, *bits
        )
        assert done.code == 0, done.err
        assert ("weights stay floats" in done.out) == bool(bits)
        errors.append(float((logits(output, ids) - floats).square().mean()))
        values = json.loads((output / "config.json").read_text())["quantization_config"]
        tensors = load_file(output / "model.safetensors")
        layers = {name: each for name, each in tensors.items() if ".layers." in name}
        matrices = [each for each in layers.values() if each.dim() == 2 and each.shape[1] > 1]
        found = sum(8 * each.nbytes for each in matrices) / sum(map(torch.numel, matrices))
        assert 8 <= found <= float(bits[-1] if bits else 8)
        kept = [name for name in values["ignore"] if ".layers." in name]
        assert bool(kept) == bool(bits)
        assert all(layers[f"{name}.weight"].dtype == torch.bfloat16 for name in kept)
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize(
    ("bits", "words"),
    [("8", "more than the 8 bits of FP8"), ("8.001", "no room for one layer")],
)
def test_bits_that_no_choice_of_layers_has_are_refused(
    bits, words, trained, tmp_path, trimaran
):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    done = trimaran(
        "quantize", "--checkpoint", trained, "--output", tmp_path / "out",
        "--calib", text, "--auto_quantize_bits", bits,
    )  # fmt: skip
    assert done.code == 2 and words in done.err
