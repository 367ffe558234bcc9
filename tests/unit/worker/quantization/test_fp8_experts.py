"""Experts with FP8 weights: against an emulation in transformers, and over ranks."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.worker.models import models
from tests.unit.worker.models.conftest import OPS
from tests.unit.worker.models.paged_run import PagedRun, logits_alone_and_beside
from tests.unit.worker.quantization import checkpoints
from tests.unit.worker.quantization.emulation import emulate
from trimaran.comm.errors import ConfigError
from trimaran.kernels.byte_reference import dequantize_weight
from trimaran.worker.layers.experts import Experts
from trimaran.worker.parallel.tensor_parallel import ExpertRanks, ShardPosition
from trimaran.worker.quantization.fp8_experts import Fp8ExpertMethod

CONFIGS = {
    "mixtral": models.expert_configs()["mixtral"],
    "qwen3-moe": models.expert_configs()["qwen3-moe"],
    "deepseek-v3": models.latent_configs()["deepseek3"],
}
FORMATS = ("fp8-blocks", "fp8-tensor-static", "compressed-channel-token")


@pytest.mark.matrix(keep=5)
@torch.inference_mode()
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_an_emulation(family, form, tmp_path):
    config = CONFIGS[family]
    folder = checkpoints.make(tmp_path, form, config)
    checkpoints.dequantize_folder(folder, tmp_path / "floats")
    theirs = models.load_huggingface(tmp_path / "floats", config)
    (prompt,) = models.prompts(40)
    unquantized = theirs(torch.tensor([prompt])).logits[0]
    emulate(theirs, form)
    expected = theirs(torch.tensor([prompt])).logits[0]
    for make_ops in OPS.values():
        ours = models.load_ours(folder, ops=make_ops(torch.float32))

        logits = PagedRun(ours, 1).logits({0: prompt})

        # Sums in another order may round an input to the neighbouring FP8 number, and a token
        # then may choose another expert.
        assert (logits - expected).abs().median() < 0.02 * expected.std()
        distance = (logits - unquantized).abs().mean()
        assert 0 < distance <= 1.5 * (expected - unquantized).abs().mean()


@torch.inference_mode()
@pytest.mark.parametrize("form", FORMATS)
def test_a_token_does_not_depend_on_other_tokens_of_its_step(form, tmp_path):
    folder = checkpoints.make(tmp_path, form, CONFIGS["qwen3-moe"])
    ours = models.load_ours(folder, ops=OPS["cpu kernels"](torch.float32))

    alone, beside = logits_alone_and_beside(ours)

    assert alone.equal(beside)


@pytest.mark.matrix(keep=3)
@pytest.mark.parametrize("layout", [(3, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_all_ranks_together_hold_the_experts_of_a_single_rank(form, layout, tmp_path):
    size, num_parts = layout
    folder = checkpoints.make(tmp_path, form, CONFIGS["qwen3-moe"])
    whole = models.load_ours(folder)
    ranks = [
        models.load_ours(folder, ShardPosition(at, size), experts=ExpertRanks(num_parts))
        for at in range(size)
    ]
    for path, layer in whole.named_modules():
        if not isinstance(layer, Experts):
            continue
        seen = set()
        for rank in ranks:
            mine = rank.get_submodule(path)
            assert isinstance(mine.method, Fp8ExpertMethod)
            for slot in range(mine.num_slots):
                seen.add(mine.first + slot)
                for name, matrix in mine.matrices.items():
                    expected = floats_of(layer, name, mine.first + slot)
                    assert_is_share(
                        floats_of(mine, name, slot), expected, matrix, layer.matrices[name]
                    )
        assert seen == set(range(6))


def floats_of(layer, name, slot):
    """An expert's matrix as its product reads it."""
    (values, scales, blocks), _ = layer.method._matrices(layer, name).of(slot)
    if blocks is None:
        return values.float() * scales[:, None]
    spread = scales.repeat_interleave(blocks.size, 1)[:, : values.shape[1]]
    return values.float() * spread[blocks.rows]


def assert_is_share(found, expected, matrix, whole):
    """Whether a rank's matrix is that rank's share of a whole matrix, and zero elsewhere."""
    columns = matrix.input_partition
    for name, part in matrix.output_parts.items():
        share = part.partition
        rows = expected[whole.output_parts[name].offset + share.first :][: share.count]
        block = found[part.offset :][: share.size]
        assert block[: share.count, : columns.count].equal(
            rows[:, columns.first :][:, : columns.count]
        )
        assert not block[share.count :].any()
        assert not block[:, columns.count :].any()


@pytest.mark.parametrize("form", FORMATS)
def test_an_experts_matrix_is_that_of_the_checkpoint_dequantized(form, tmp_path):
    folder = checkpoints.make(tmp_path, form, CONFIGS["mixtral"])
    stored = load_file(folder / "model.safetensors")
    layer = models.load_ours(folder).get_submodule("layers.1.mlp.experts")
    block = checkpoints.BLOCK if form == "fp8-blocks" else None
    for part, name in (("w1", "gate_up"), ("w3", "gate_up"), ("w2", "down")):
        key = f"model.layers.1.block_sparse_moe.experts.4.{part}.weight"
        scale = stored.get(f"{key}_scale", stored.get(f"{key}_scale_inv"))
        expected = dequantize_weight(stored[key], scale, block, torch.float32)
        rows = slice(expected.shape[0], None) if part == "w3" else slice(expected.shape[0])
        assert floats_of(layer, name, 4)[rows].equal(expected), part


def test_an_expert_without_its_scales_is_refused(tmp_path):
    folder = checkpoints.make(tmp_path, "fp8-blocks", CONFIGS["qwen3-moe"])
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight_scale_inv"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"experts\.3\.up_proj\.weight_scale' is missing"):
        models.load_ours(folder)


def test_scales_of_experts_that_are_no_numbers_are_refused(tmp_path):
    folder = checkpoints.make(tmp_path, "compressed-channel-token", CONFIGS["qwen3-moe"])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.experts.5.down_proj.weight_scale"][7] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="scales are no numbers"):
        models.load_ours(folder)


def test_added_slots_of_experts_hold_what_is_moved_to_them(tmp_path):
    folder = checkpoints.make(tmp_path, "fp8-blocks", CONFIGS["qwen3-moe"])
    model = models.load_ours(folder, ops=OPS["cpu kernels"](torch.float32))
    layer = model.get_submodule("layers.0.mlp.experts")
    x = torch.randn(9, 240)
    weights, ids = torch.ones(9, 1), torch.full((9, 1), 4, dtype=torch.int32)
    expected = layer.forward(x, weights, ids)

    layer.make_slots(2)
    for parameter in layer.parameters():
        parameter.data[7] = parameter.data[4]

    assert layer.forward(x, weights, ids + 3).equal(expected)
