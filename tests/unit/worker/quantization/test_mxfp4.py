"""gpt-oss with MXFP4 experts as it ships: against transformers, over ranks, and built."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.unit.worker.models import models
from tests.unit.worker.models.conftest import OPS
from tests.unit.worker.models.paged_run import PagedRun, logits_alone_and_beside
from trimaran.comm.errors import ConfigError
from trimaran.kernels.integer_reference import dequantize
from trimaran.launcher.cli.main import main
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.layers.experts import Experts
from trimaran.worker.models.interfaces import StageRange
from trimaran.worker.models.quantized_layers import finish_weights
from trimaran.worker.models.registry import build_model
from trimaran.worker.models.weights.weight_loader import (
    fill_random,
    load_checkpoint,
    load_shard,
)
from trimaran.worker.parallel.tensor_parallel import ExpertRanks, ShardPosition

GROUP = 32
CONFIG = models.sink_configs()["gpt-oss"]
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
        "lm_head",
    ],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of random FP4 codes and scales; beside it, in ``floats``, its experts as
    transformers dequantizes them."""
    models.save_huggingface(tmp_path / "floats", CONFIG)
    tensors = load_file(tmp_path / "floats" / "model.safetensors")
    packed, floats = dict(tensors), dict(tensors)
    generator = torch.Generator().manual_seed(3)
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        shape = experts, outputs, inputs // GROUP
        blocks = torch.randint(0, 256, (*shape, GROUP // 2), generator=generator)
        scales = torch.randint(127 - 7, 127 - 3, shape, generator=generator)
        packed[f"{name}_blocks"] = blocks.to(torch.uint8)
        packed[f"{name}_scales"] = scales.to(torch.uint8)
        del packed[name]
        made = convert_moe_packed_tensors(
            packed[f"{name}_blocks"], packed[f"{name}_scales"], dtype=torch.float32
        )
        floats[name] = made.contiguous()
    save_file(floats, tmp_path / "floats" / "model.safetensors", {"format": "pt"})
    folder = tmp_path / "mxfp4"
    folder.mkdir()
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((tmp_path / "floats" / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**values, "quantization_config": QUANTIZATION})
    )
    return folder


def floats_of(folder):
    return folder.parent / "floats"


def experts_of(model):
    return {name: each for name, each in model.named_modules() if isinstance(each, Experts)}


def matrices(layer, name):
    """The floats of the slots' matrices."""
    return torch.stack([dequantize(each) for each in layer.method.weights_of(layer, name)])


def test_dequantized_experts_equal_those_of_transformers_to_the_bit(folder):
    model = models.load_ours(folder, is_finished=False)
    plain = models.load_ours(floats_of(folder))

    layers = experts_of(model)

    assert len(layers) == CONFIG.num_hidden_layers
    for path, layer in layers.items():
        expected = plain.get_submodule(path)
        assert layer.method.name == "mxfp4"
        assert matrices(layer, "gate_up").equal(expected.gate_up)
        assert matrices(layer, "down").equal(expected.down)
        # In its own bits: half a byte a number, and a byte for each group of them.
        assert (
            layer.gate_up.dtype is torch.uint8
            and layer.gate_up_weight_scale.element_size() == 1
        )
        assert layer.gate_up.numel() * 2 == expected.gate_up.numel()


@torch.inference_mode()
@pytest.mark.parametrize("ops", list(OPS))
def test_tokens_and_logits_are_those_of_transformers_on_the_dequantized_weights(folder, ops):
    theirs = models.load_huggingface(floats_of(folder), CONFIG)
    ours = models.load_ours(folder, ops=OPS[ops](torch.float32))
    prompts = models.prompts(1, 5, 37)

    outputs = PagedRun(ours, 3).greedy(prompts, 8)
    logits = PagedRun(ours, 1).logits({0: prompts[2]})

    assert outputs == models.reference_greedy(theirs, prompts, 8)
    expected = theirs(torch.tensor([prompts[2]])).logits[0]
    assert (logits - expected).abs().max() < 1e-3 * expected.std()


@torch.inference_mode()
def test_a_token_does_not_depend_on_other_tokens_of_its_step(folder):
    ours = models.load_ours(folder, ops=OPS["cpu kernels"](torch.float32))

    alone, beside = logits_alone_and_beside(ours)

    assert alone.equal(beside)


@pytest.mark.parametrize("layout", [(2, 1), (4, 1), (4, 2), (3, 3)], ids=str)
def test_all_ranks_together_have_the_sums_of_a_single_rank(folder, layout):
    size, num_parts = layout
    path = "layers.1.mlp.experts"
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(14, dtype=torch.int32).view(7, 2) % 6
    weights = torch.full((7, 2), 0.5)
    whole = models.load_ours(folder).get_submodule(path)

    parts = [
        models.load_ours(folder, ShardPosition(at, size), experts=ExpertRanks(num_parts))
        .get_submodule(path)
        .forward(x, weights, ids)
        for at in range(size)
    ]

    torch.testing.assert_close(sum(parts), whole.forward(x, weights, ids), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_built_folder_holds_what_a_checkpoint_gives_a_rank(folder, tmp_path):
    output = tmp_path / "engine"
    words = ["build", "--checkpoint", folder, "--output", output, "--dtype", "float32",
             "--tp-size", 2, "--workers", 1]  # fmt: skip
    assert main([str(word) for word in words]) == 0

    engine = EngineFolder.load(output)
    stage = StageRange.of(engine.config.num_hidden_layers, 0, 1)
    for rank in range(2):
        position = ShardPosition(rank, 2)
        built = build_model(
            engine.config, stage, position, dtype=torch.float32, device=models.CPU
        )
        load_shard(built, engine.shard_of(rank))
        loaded = dict(models.load_ours(folder, position, is_finished=False).named_parameters())
        for name, parameter in built.named_parameters():
            assert parameter.equal(loaded[name]), name
    section = json.loads((output / "config.json").read_text())["pretrained_config"]
    assert section["quantization"]["quant_algo"] == "W4A16_MXFP4"


def test_random_experts_are_served(folder):
    source = EngineFolder.load(folder)
    stage = StageRange.of(source.config.num_hidden_layers, 0, 1)
    model = build_model(
        source.config, stage, ShardPosition(), dtype=torch.float32, device=models.CPU
    )
    fill_random(model)
    finish_weights(model)
    layer = model.get_submodule("layers.0.mlp.experts")
    found = layer.forward(torch.randn(3, 96), torch.ones(3, 1), torch.zeros(3, 1).int())
    assert found.isfinite().all() and found.abs().sum() > 0


def test_an_expert_without_its_scales_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.down_proj_scales"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"experts\.down_proj\.weight_scale' is missing"):
        models.load_ours(folder)


def test_a_scale_that_is_no_number_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.experts.down_proj_scales"][4, 3] = 255
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="scales are no numbers"):
        models.load_ours(folder)


def test_fp8_experts_with_biases_are_refused(tmp_path):
    models.save_huggingface(tmp_path, CONFIG)
    source = EngineFolder.load(tmp_path).quantized("fp8")
    stage = StageRange.of(source.config.num_hidden_layers, 0, 1)
    with pytest.raises(ConfigError, match="experts with biases are not served in FP8"):
        build_model(
            source.config, stage, ShardPosition(), dtype=torch.float32, device=models.CPU
        )


def test_experts_of_floats_are_quantized_as_they_are_loaded(tmp_path):
    models.save_huggingface(tmp_path, CONFIG)
    plain = models.load_ours(tmp_path)
    source = EngineFolder.load(tmp_path).quantized("int8")
    stage = StageRange.of(source.config.num_hidden_layers, 0, 1)
    model = build_model(
        source.config, stage, ShardPosition(), dtype=torch.float32, device=models.CPU
    )
    load_checkpoint(model, source.weight_files)
    for path, layer in experts_of(model).items():
        expected = plain.get_submodule(path)
        for name in layer.matrices:
            rows = getattr(expected, name)
            off = (matrices(layer, name) - rows).abs().amax(2)
            # Half of a step, and the rounding of scales to bf16.
            assert (off <= 0.51 * rows.abs().amax(2) / 127 * 1.01).all(), (path, name)


def test_a_folder_of_quantized_floats_is_refused_for_stacked_experts(tmp_path, capsys):
    models.save_huggingface(tmp_path / "floats", CONFIG)
    words = ["quantize", "--checkpoint", tmp_path / "floats", "--output", tmp_path / "int8",
             "--quantization", "int8"]  # fmt: skip
    assert main([str(word) for word in words]) != 0
    assert "stores matrices as [in, out]" in capsys.readouterr().err
