"""Experts with integer weights: against transformers, and over ranks."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.worker.models import models
from tests.unit.worker.models.conftest import OPS
from tests.unit.worker.models.paged_run import PagedRun, logits_alone_and_beside
from tests.unit.worker.quantization import integer_checkpoints
from tests.unit.worker.quantization.integer_checkpoints import FORMS
from trimaran.comm.errors import ConfigError
from trimaran.kernels.integer_reference import dequantize
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.layers.experts import Experts
from trimaran.worker.models.interfaces import StageRange
from trimaran.worker.models.quantized_layers import finish_weights
from trimaran.worker.models.registry import build_model
from trimaran.worker.models.weights.weight_loader import fill_random
from trimaran.worker.parallel.tensor_parallel import ExpertRanks, ShardPosition
from trimaran.worker.quantization.integer_experts import IntegerExpertMethod

CONFIGS = {
    "mixtral": models.expert_configs()["mixtral"],
    "qwen2-moe": models.expert_configs()["qwen2-moe"],
    "qwen3-moe": models.expert_configs()["qwen3-moe"],
    "deepseek-v3": models.latent_configs()["deepseek3"],
}
# Words of 4 bits hold eight inputs.
CONFIGS["deepseek-v3"].kv_lora_rank = 40
NAMES = ("awq", "gptq-v2", "gptq-desc-act", "packed-zeros", "packed-8-bits")
PAIRS = [("mixtral", name) for name in NAMES] + [
    ("qwen2-moe", "gptq"),
    ("qwen3-moe", "awq"),
    ("qwen3-moe", "packed-actorder"),
    ("deepseek-v3", "packed"),
]


def make(tmp_path, family, name):
    return integer_checkpoints.make(tmp_path, FORMS[name], CONFIGS[family])


def floats_of(layer, name, slot):
    """An expert's matrix as its product reads it, before the weights are stored."""
    return dequantize(layer.method.weights_of(layer, name)[slot])


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_dequantized_experts_equal_the_formats_numbers_to_the_bit(family, name, tmp_path):
    folder = make(tmp_path, family, name)
    expected = load_file(tmp_path / "floats" / "model.safetensors")
    model = models.load_ours(folder, is_finished=False)
    targets = model.checkpoint_weights()
    count = 0
    for key, weight in expected.items():
        own = key.removeprefix("model.")
        for target in targets.get(own, ()):
            layer = model.get_submodule(target.parameter.rpartition(".")[0])
            if not isinstance(layer, Experts):
                continue
            assert isinstance(layer.method, IntegerExpertMethod)
            slot, part = layer.place(target.shard)
            matrix = layer.matrix_of(part)
            rows = matrix.output_parts[part]
            found = floats_of(layer, target.parameter.rpartition(".")[2], slot)
            assert found[rows.offset : rows.offset + len(weight)].equal(weight), key
            count += 1
    layers = [each for each in model.modules() if isinstance(each, Experts)]
    assert count == 3 * layers[0].num_slots * len(layers)


@pytest.mark.matrix(keep=5)
@torch.inference_mode()
@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_logits_are_those_of_transformers_on_the_dequantized_weights(family, name, tmp_path):
    folder = make(tmp_path, family, name)
    theirs = models.load_huggingface(tmp_path / "floats", CONFIGS[family])
    (prompt,) = models.prompts(40)
    expected = theirs(torch.tensor([prompt])).logits[0]
    for make_ops in OPS.values():
        ours = models.load_ours(folder, ops=make_ops(torch.float32))

        logits = PagedRun(ours, 1).logits({0: prompt})

        assert (logits - expected).abs().max() < 1e-3 * expected.std()
        assert logits.argmax(1).equal(expected.argmax(1))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gptq-desc-act", "packed"])
def test_a_token_does_not_depend_on_other_tokens_of_its_step(name, tmp_path):
    folder = make(tmp_path, "qwen3-moe", name)
    ours = models.load_ours(folder, ops=OPS["cpu kernels"](torch.float32))

    alone, beside = logits_alone_and_beside(ours)

    assert alone.equal(beside)


@pytest.mark.parametrize("layout", [(3, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("name", ["gptq-desc-act", "packed-8-bits"])
def test_all_ranks_together_hold_the_experts_of_a_single_rank(name, layout, tmp_path):
    size, num_parts = layout
    folder = make(tmp_path, "qwen3-moe", name)
    path = "layers.1.mlp.experts"
    whole = models.load_ours(folder, is_finished=False).get_submodule(path)
    seen = set()
    for at in range(size):
        mine = models.load_ours(
            folder, ShardPosition(at, size), is_finished=False, experts=ExpertRanks(num_parts)
        ).get_submodule(path)
        for slot in range(mine.num_slots):
            seen.add(mine.first + slot)
            for matrix in mine.matrices:
                expected = floats_of(whole, matrix, mine.first + slot)
                assert_is_share(floats_of(mine, matrix, slot), expected, mine, whole, matrix)
    assert seen == set(range(6))


def assert_is_share(found, expected, mine, whole, name):
    """Whether a rank's matrix is that rank's share of a whole matrix, and rows of padding are
    zero."""
    columns = mine.matrices[name].input_partition
    for part, each in mine.matrices[name].output_parts.items():
        share, offset = each.partition, whole.matrices[name].output_parts[part].offset
        rows = expected[offset + share.first :][: share.count]
        block = found[each.offset :][: share.size, : columns.count]
        assert block[: share.count].equal(rows[:, columns.first :][:, : columns.count])
        assert not block[share.count :].any()


def test_routers_and_excluded_layers_keep_the_models_dtype(tmp_path):
    folder = make(tmp_path, "mixtral", "gptq")
    floats = load_file(tmp_path / "floats" / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    layer = "model.layers.1.block_sparse_moe.experts"
    kept = {name: each for name, each in tensors.items() if not name.startswith(layer)}
    kept |= {name: each for name, each in floats.items() if name.startswith(layer)}
    save_file(kept, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"]["modules_to_not_convert"] = [layer]
    (folder / "config.json").write_text(json.dumps(values))

    model = models.load_ours(folder)

    names = [each.method.name for _, each in model.named_modules() if isinstance(each, Experts)]
    assert names == ["int4", "unquantized", "int4", "int4"]
    router = model.get_submodule("layers.0.mlp.router")
    assert router.weight.equal(floats["model.layers.0.block_sparse_moe.gate.weight"])


def test_experts_of_one_layer_that_are_quantized_differently_are_refused(tmp_path):
    folder = make(tmp_path, "mixtral", "gptq")
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"]["dynamic"] = {r"-:.*layers\.1\..*experts\.3\.w2": {}}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"experts\.3\.w2.weight not at all"):
        models.load_ours(folder)


def test_experts_whose_inputs_become_bytes_are_refused(tmp_path):
    folder = make(tmp_path, "mixtral", "plain-bytes")
    with pytest.raises(ConfigError, match="experts whose inputs become INT8 are not served"):
        models.load_ours(folder)


def test_an_expert_without_its_zero_points_is_refused(tmp_path):
    folder = make(tmp_path, "qwen3-moe", "awq")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.3.up_proj.qzeros"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"experts\.3\.up_proj\.weight_zero' is missing"):
        models.load_ours(folder)


def test_scales_of_experts_that_are_no_numbers_are_refused(tmp_path):
    folder = make(tmp_path, "qwen3-moe", "packed")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.experts.5.down_proj.weight_scale"][7] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="scales are no numbers"):
        models.load_ours(folder)


@pytest.mark.parametrize("ops", list(OPS))
def test_added_slots_of_experts_hold_what_is_moved_to_them(ops, tmp_path):
    folder = make(tmp_path, "qwen3-moe", "gptq-desc-act")
    model = models.load_ours(folder, ops=OPS[ops](torch.float32))
    layer = model.get_submodule("layers.0.mlp.experts")
    x = torch.randn(9, 240)
    weights, ids = torch.ones(9, 1), torch.full((9, 1), 4, dtype=torch.int32)
    expected = layer.forward(x, weights, ids)

    layer.make_slots(2)
    for parameter in layer.parameters():
        parameter.data[7] = parameter.data[4]

    assert layer.forward(x, weights, ids + 3).equal(expected)


def test_experts_count_as_weights_once_they_are_stored(tmp_path):
    folder = make(tmp_path, "mixtral", "packed")
    loaded = models.load_ours(folder, is_finished=False).num_weight_bytes
    for ops in OPS.values():
        served = models.load_ours(folder, ops=ops(torch.float32)).num_weight_bytes
        assert 0.8 * loaded <= served < 1.2 * loaded


def test_random_experts_of_integers_are_served(tmp_path):
    folder = make(tmp_path, "qwen3-moe", "awq")
    source = EngineFolder.load(folder)
    stage = StageRange.of(source.config.num_hidden_layers, 0, 1)
    model = build_model(
        source.config, stage, ShardPosition(), dtype=torch.float32, device=models.CPU
    )
    fill_random(model)
    finish_weights(model)
    layer = model.get_submodule("layers.0.mlp.experts")
    x = torch.randn(3, 240)
    found = layer.forward(x, torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32))
    assert found.abs().sum() > 0
