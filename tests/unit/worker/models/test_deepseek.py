"""Features of DeepSeek alone: the compressed cache, head matrices, a skipped layer."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun, logits_alone_and_beside
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.worker.models.weights.weight_loader import fill_random
from trimaran.worker.parallel.tensor_parallel import ShardPosition

CONFIGS = models.latent_configs()
LATENT, ROTATED = 36, 8


def ranks_of(folder, size):
    return [models.load_ours(folder, ShardPosition(rank, size)) for rank in range(size)]


def test_every_rank_caches_the_latent_vector_and_one_rotated_key_of_a_token(tmp_path):
    models.save_huggingface(tmp_path, CONFIGS["deepseek2"])

    for model in (models.load_ours(tmp_path), *ranks_of(tmp_path, 4)):
        specs = model.kv_cache_specs()
        assert [spec.block_shape(16) for spec in specs] == [(1, 16, 1, LATENT + ROTATED)] * 4
        assert specs[0].token_bytes == (LATENT + ROTATED) * 4


def test_the_heads_of_all_ranks_make_up_the_matrices_of_the_checkpoint(tmp_path):
    models.save_huggingface(tmp_path, CONFIGS["deepseek2-lite"])
    whole = load_file(tmp_path / "model.safetensors")
    expected = whole["model.layers.2.self_attn.kv_b_proj.weight"].view(12, 20 + 12, LATENT)

    shards = [dict(model.named_parameters()) for model in ranks_of(tmp_path, 4)]

    def joined(name):
        return torch.cat([shard[f"layers.2.attention.{name}.weight"] for shard in shards])

    assert joined("key_up").transpose(1, 2).equal(expected[:, :20])
    assert joined("value_up").equal(expected[:, 20:])


def test_random_weights_that_every_rank_holds_whole_are_the_same(tmp_path):
    models.save_huggingface(tmp_path, CONFIGS["deepseek3"])
    first, second = ranks_of(tmp_path, 2)
    for model in (first, second):
        fill_random(model)

    others = dict(second.named_parameters())
    same = {name for name, each in first.named_parameters() if each.equal(others[name])}

    layer = "layers.1.attention"
    assert {f"{layer}.down_proj.weight", f"{layer}.kv_norm.weight"} <= same
    assert not {f"{layer}.q_proj.weight", f"{layer}.key_up.weight"} & same


def test_the_multi_token_prediction_layer_is_left_out(tmp_path):
    theirs = models.save_huggingface(tmp_path, CONFIGS["deepseek3"])
    tensors = load_file(tmp_path / "model.safetensors")
    last = {name: each for name, each in tensors.items() if name.startswith("model.layers.3.")}
    behind = {name.replace("s.3.", "s.4."): each.clone() for name, each in last.items()}
    tensors |= behind
    for name in ("eh_proj.weight", "enorm.weight", "shared_head.head.weight"):
        tensors[f"model.layers.4.{name}"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    (prompt,) = models.prompts(20)

    logits = PagedRun(models.load_ours(tmp_path), 1).logits({0: prompt})

    expected = theirs(torch.tensor([prompt])).logits[0].detach()
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_logits_on_the_cpu_do_not_depend_on_the_batch(dtype, tmp_path):
    models.save_huggingface(tmp_path, CONFIGS["deepseek3"], dtype=dtype)
    ours = models.load_ours(tmp_path, dtype=dtype, ops=CpuOps(load_library(), dtype, 1))

    alone, beside = logits_alone_and_beside(ours)

    assert beside.equal(alone)


@pytest.mark.parametrize("name", ["deepseek2", "deepseek3"])
def test_logits_in_bfloat16_are_within_rounding_of_float32(name, tmp_path):
    dtype = torch.bfloat16
    theirs = models.save_huggingface(tmp_path, CONFIGS[name], dtype=dtype)
    ours = models.load_ours(tmp_path, dtype=dtype, ops=CpuOps(load_library(), dtype, 1))
    (prompt,) = models.prompts(40)

    logits = PagedRun(ours, 1).logits({0: prompt})

    expected = theirs(torch.tensor([prompt])).logits[0].detach().float()
    exact = theirs.float()(torch.tensor([prompt])).logits[0].detach()
    # Queries are rounded once more, after their product with a head's matrix.
    assert (logits - exact).abs().mean() <= 1.5 * (expected - exact).abs().mean()
