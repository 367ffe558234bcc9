"""SmoothQuant: the same results before rounding, smaller errors behind, and the flags."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun
from trimaran.builder.quantization.byte_form import ByteForm
from trimaran.builder.quantization.smoothing import channel_factors, smoothing
from trimaran.comm.tokenizers.prepare import prepare
from trimaran.kernels.integer_reference import quantize_inputs
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.config.quantization import ANY_LINEAR
from trimaran.worker.layers.linear import ParallelLinear
from trimaran.worker.models.interfaces import StageRange
from trimaran.worker.models.registry import build_model
from trimaran.worker.models.weights.checkpoint import find_tensors
from trimaran.worker.models.weights.parts import parts_of
from trimaran.worker.models.weights.weight_loader import load_shard
from trimaran.worker.parallel.tensor_parallel import ShardPosition

TEXT = (
    "It was a cold morning, and the road to the village was white with frost. The old man who "
    "kept the gate came out with a lantern in his hand, and asked us where we were going. "
) * 3
DRAFT = Path(__file__).parents[3] / "examples" / "demo_models" / "draft"
FAMILIES = {**models.dense_configs(), **models.parallel_configs()}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OUTLIERS = [3, 50]


@pytest.fixture
def text(tmp_path):
    """A file of text."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def rewrite(source, target, change):
    """Copy a folder, its tensors changed."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    made = {name: change(name, each).contiguous() for name, each in tensors.items()}
    save_file(made, target / "model.safetensors", {"format": "pt"})


def floats_of(folder, target):
    """A folder of the floats for which a W8A8 folder stands."""
    tensors = load_file(folder / "model.safetensors")
    made = {}
    for name, each in tensors.items():
        if each.dtype is torch.int8:
            made[name] = each.float() * tensors[f"{name}_scale"].float()
        elif not name.endswith("_scale"):
            made[name] = each.float()
    target.mkdir()
    save_file(made, target / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    (target / "config.json").write_text(json.dumps({**values, "dtype": "float32"}))
    return tensors


def emulated(folder, target):
    """Transformers' model of the dequantized weights, whose inputs are rounded by torch."""
    tensors = floats_of(folder, target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    def hook_of(scale):
        def quantized(module, args):
            values, scales = quantize_inputs(args[0].flatten(0, -2), scale)
            return ((values.float() * scales).view_as(args[0]),)

        return quantized

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LINEARS:
            scale = tensors.get(f"{name}.input_scale")
            module.register_forward_pre_hook(hook_of(None if scale is None else scale[0]))
    return model


@torch.inference_mode()
def logits(folder, ids):
    """Float32 logits of a Hugging Face folder by our model."""
    return PagedRun(models.load_ours(folder), 1, max_len=len(ids)).logits({0: ids})


@pytest.mark.matrix(keep=4)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_smoothed_floats_leave_the_logits_of_each_family_as_they_are(family, tmp_path):
    config = FAMILIES[family]
    models.save_huggingface(tmp_path / "plain", config)
    source = EngineFolder.load(tmp_path / "plain")
    stage = StageRange.of(source.config.num_hidden_layers, 0, 1)
    model = build_model(
        source.config, stage, ShardPosition(), dtype=torch.float32, device=torch.device("meta")
    )
    generator = torch.Generator().manual_seed(0)
    peaks = {
        path: torch.randn(layer.weight.shape[1], generator=generator).exp()
        for path, layer in model.named_modules()
        if isinstance(layer, ParallelLinear)
    }
    parts = parts_of(model, find_tensors(model, source.weight_files))

    changes = smoothing(model, parts, peaks, 0.5, through_products=True)

    rewrite(tmp_path / "plain", tmp_path / "smooth", changes.floats)
    (prompt,) = models.prompts(24)
    before, after = (logits(tmp_path / name, prompt) for name in ("plain", "smooth"))
    assert len(changes.columns) >= 2 * source.config.num_hidden_layers
    assert (after - before).abs().max() < 2e-4 * before.std()


def test_weights_scales_and_norms_are_those_of_a_plain_computation(text, tmp_path, trimaran):
    output = tmp_path / "out"

    done = trimaran(
        "quantize", "--checkpoint", DRAFT, "--output", output, "--qformat", "int8_sq",
        "--calib", text, "--smoothquant", "0.75",
    )  # fmt: skip

    assert done.code == 0, done.err
    floats, made = (
        load_file(DRAFT / "model.safetensors"),
        load_file(output / "model.safetensors"),
    )
    peaks = peaks_by_transformers(DRAFT)
    for number in range(2):
        layer = f"model.layers.{number}"
        for norm, names in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            before = floats[f"{layer}.{norm}.weight"].float()
            factors = before / made[f"{layer}.{norm}.weight"].float()
            every = [floats[f"{layer}.{name}.weight"].float() for name in names]
            largest = torch.stack([each.abs().amax(0) for each in every]).amax(0)
            peak = peaks[f"{layer}.{names[0]}"]
            # The norm is rounded to bf16, and transformers measured in float32.
            expected = peak**0.75 / largest**0.25
            assert ((factors / expected).log().abs() < 0.03).all()
            for name in names[:2] if norm == "input_layernorm" else names[:1]:
                weight = floats[f"{layer}.{name}.weight"].float() * factors
                scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
                integers = (weight / scales.float()).round().clamp(-128, 127)
                key = f"{layer}.{name}.weight"
                assert made[f"{key}_scale"].equal(scales)
                assert made[key].dtype is torch.int8 and made[key].float().equal(integers)


@torch.inference_mode()
def peaks_by_transformers(folder):
    """The largest inputs of each linear layer on the text, by name."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    peaks = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LINEARS:
            module.register_forward_pre_hook(
                lambda _, args, name=name: peaks.__setitem__(name, args[0].abs().amax((0, 1)))
            )
    model(torch.tensor([prepare(folder).fast().encode(TEXT).ids]))
    return peaks


def with_outliers(target):
    """The demo's draft model whose norms make inputs with large channels, for smaller weights;
    powers of two leave its results as they are."""

    def change(name, tensor):
        made = tensor.clone()
        if "layernorm" in name:
            made[OUTLIERS] *= 64
        elif name.rpartition(".")[0].endswith(("q_proj", "k_proj", "v_proj")) or (
            "gate_proj" in name or "up_proj" in name
        ):
            made[:, OUTLIERS] /= 64
        return made

    rewrite(DRAFT, target, change)


def test_smoothing_makes_the_errors_of_outliers_smaller_by_a_factor(text, tmp_path, trimaran):
    floats = tmp_path / "floats"
    with_outliers(floats)
    ids = prepare(DRAFT).fast().encode(TEXT).ids[:96]
    expected = logits(DRAFT, ids)
    assert (logits(floats, ids) - expected).abs().max() < 1e-3 * expected.std()
    form = ByteForm(has_row_scales=True)
    (tmp_path / "plain").mkdir()
    made = {}
    for name, each in load_file(floats / "model.safetensors").items():
        is_linear = name.removesuffix(".weight").endswith(LINEARS)
        made |= dict(form.tensors(name, each)) if is_linear else {name: each}
    save_file(made, tmp_path / "plain" / "model.safetensors")
    values = json.loads((floats / "config.json").read_text())
    values["quantization_config"] = form.description(["lm_head"])
    (tmp_path / "plain" / "config.json").write_text(json.dumps(values))

    done = trimaran(
        "quantize", "--checkpoint", floats, "--output", tmp_path / "smooth",
        "--qformat", "int8_sq", "--calib", text,
    )  # fmt: skip

    assert done.code == 0, done.err
    plain, smooth = (
        float((logits(tmp_path / name, ids) - expected).norm()) for name in ("plain", "smooth")
    )
    assert smooth < plain / 4


FORMS = {
    ("--per_channel", "--per_token"): "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
    ("--per_channel",): "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
    ("--per_token",): "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
    (): "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
}


@pytest.mark.parametrize("flags", list(FORMS), ids=lambda flags: " ".join(flags) or "neither")
@torch.inference_mode()
def test_an_engine_of_each_form_gives_the_tokens_of_an_emulation(
    flags, text, tmp_path, trimaran
):
    words = ("--smoothquant", "0.5", "--calib_dataset", text, *flags, "--dtype", "float32")

    done = trimaran("build", "--checkpoint", DRAFT, "--output", tmp_path / "engine", *words)

    assert done.code == 0, done.err
    assert "accepted without effect" not in done.err
    engine = EngineFolder.load(tmp_path / "engine")
    assert engine.config.quantization.to_dict()["quant_algo"] == FORMS[flags]
    assert [path.name for path in tmp_path.iterdir() if "smoothed" in path.name] == []
    stage = StageRange.of(engine.config.num_hidden_layers, 0, 1)
    ours = build_model(
        engine.config, stage, ShardPosition(), dtype=torch.float32, device=models.CPU
    )
    load_shard(ours, engine.weight_files[0])
    ours.process_weights_after_loading()
    theirs = emulated(kept_folder(tmp_path, text, flags), tmp_path / "emulated")
    prompt = prepare(DRAFT).fast().encode(TEXT).ids[:20]

    (tokens,) = PagedRun(ours, 1, max_len=60).greedy([prompt], 32)

    ids = prompt + tokens
    expected = theirs(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
    found = PagedRun(ours, 1, max_len=60).logits({0: ids[:-1]})[len(prompt) - 1 :]
    error = (found - expected).abs()
    assert error.median() < 0.01 * expected.std()
    best = expected.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > 2 * error.amax(1)
    assert is_clear.sum() > 16
    assert expected.argmax(1)[is_clear].equal(torch.tensor(tokens)[is_clear])


def kept_folder(tmp_path, text, flags):
    """The W8A8 folder from which a build with these flags makes its shards."""
    from trimaran.builder.quantization.smoothquant import (
        CalibrationText,
        SmoothQuant,
        write_smoothed,
    )

    how = SmoothQuant(
        strength=0.5,
        has_row_scales="--per_channel" in flags,
        has_token_scales="--per_token" in flags,
    )
    source = EngineFolder.load(DRAFT)
    folder = tmp_path / "folder"
    write_smoothed(source, how, CalibrationText("--calib_dataset", str(text)), folder)
    (rule,) = EngineFolder.load(folder).config.quantization.rules
    assert rule.targets == (ANY_LINEAR,)
    return folder


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--smoothquant", "0.5"), "Add --calib_dataset FILE"),
        (("--smoothquant", "1.5", "--calib_dataset", "x"), "--smoothquant 1.5: the strength"),
        (("--smoothquant", "high", "--calib_dataset", "x"), "--smoothquant high: the strength"),
        (("--smoothquant", "0.5", "--calib_dataset", "x"), "--calib_dataset x: cannot be read"),
        (
            ("--smoothquant", "0.5", "--calib_dataset", "x", "--quantization", "int8"),
            "--smoothquant 0.5 and --quantization int8 quantize the same weights",
        ),
        (
            ("--smoothquant", "0.5", "--calib_dataset", "x", "--use_weight_only"),
            "--smoothquant 0.5 and --use_weight_only quantize the same weights",
        ),
    ],
)
@pytest.mark.parametrize("command", ["build", "convert"])
def test_impossible_flags_are_refused_with_a_remedy(command, flags, words, tmp_path, trimaran):
    done = trimaran(command, "--checkpoint", DRAFT, "--output", tmp_path / "out", *flags)
    assert done.code == 2 and words in done.err
    assert list(tmp_path.iterdir()) == []


def test_scales_without_smoothquant_have_no_effect(tmp_path, trimaran):
    flags = ("--per_channel", "--per_token", "--smoothquant", "0")
    done = trimaran("build", "--checkpoint", DRAFT, "--output", tmp_path / "out", *flags)
    assert done.code == 0
    assert "accepted without effect: --per_channel, --per_token" in done.err


@pytest.mark.parametrize("family", ["mixtral", "deepseek2-lite", "gpt-oss"])
def test_layers_without_a_place_for_factors_are_refused_by_name(
    family, text, tmp_path, trimaran
):
    configs = {**models.expert_configs(), **models.latent_configs(), **models.sink_configs()}
    floats, output = tmp_path / "floats", tmp_path / "out"
    models.save_huggingface(floats, configs[family])
    shutil.copyfile(DRAFT / "tokenizer.json", floats / "tokenizer.json")

    done = trimaran(
        "quantize", "--checkpoint", floats, "--output", output, "--qformat", "int8_sq",
        "--calib", text,
    )  # fmt: skip

    assert done.code == 2 and not output.exists()
    assert "SmoothQuant does not know the layers of " in done.err
    assert "Name --quantization int8" in done.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--qformat", "int8_sq"), "Add --calib FILE, or name int8_wo"),
        (
            ("--qformat", "int8_sq", "--quantization", "int8", "--calib", "x"),
            "makes INT8 of all linear layers, but --quantization is int8",
        ),
        (
            ("--qformat", "int8_sq", "--auto_quantize_bits", "10", "--calib", "x"),
            "makes INT8 of all linear layers, but --auto_quantize_bits is 10.0",
        ),
        (("--smoothquant", "0.5"), "is the strength of --qformat int8_sq"),
        (
            ("--qformat", "int8_sq", "--smoothquant", "0", "--calib", "x"),
            "needs a strength above 0",
        ),
    ],
)
def test_impossible_flags_of_quantize_are_refused(flags, words, tmp_path, trimaran):
    output = tmp_path / "out"
    done = trimaran("quantize", "--checkpoint", DRAFT, "--output", output, *flags)
    assert done.code == 2 and words in done.err
    assert not output.exists()


def test_weights_that_are_quantized_already_are_refused(text, tmp_path, trimaran):
    done = trimaran("quantize", "--checkpoint", DRAFT, "--output", tmp_path / "fp8")
    assert done.code == 0
    done = trimaran(
        "quantize", "--checkpoint", tmp_path / "fp8", "--output", tmp_path / "out",
        "--qformat", "int8_sq", "--calib", text,
    )  # fmt: skip
    assert done.code == 2 and "describes quantized weights" in done.err


def test_a_channel_without_inputs_or_weights_keeps_its_size():
    factors = channel_factors(torch.tensor([0.0, 4.0, 4.0]), torch.tensor([1.0, 0.0, 1.0]), 0.5)
    assert factors.tolist() == [1.0, 1.0, 2.0]
