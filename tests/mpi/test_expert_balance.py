"""Experts that change ranks: only the distribution of work changes."""

from __future__ import annotations

import pytest
import torch

from tests.mpi.test_expert_dispatch import CONFIGS, CPU, NUM_RANKS, make_layer
from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun
from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.topology import ParallelLayout
from trimaran.kernels.torch_ops import TorchOps
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.config.experts_config import ExpertsConfig
from trimaran.worker.experts.balance import ExpertBalancer, balance_experts
from trimaran.worker.experts.loads import ExpertLoads
from trimaran.worker.layers.linear import LayerContext
from trimaran.worker.parallel.tensor_parallel import ExpertRanks, ShardPosition

# Tensor ranks of a dp rank, and parts of the experts' ranks.
LAYOUTS = [(1, 2)] if NUM_RANKS == 2 else [(1, NUM_RANKS), (2, NUM_RANKS), (2, 2)]


def placements(loads: ExpertLoads) -> list[list[list[int]]]:
    """Which expert is where, layer by layer."""
    return [each.experts.tolist() for each in loads.balancer._placements]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("num_parts", [2] if NUM_RANKS == 2 else [2, 4])
@pytest.mark.parametrize("has_all", [False, True])
def test_logits_stay_those_of_transformers_while_experts_move(
    num_parts, has_all, tensor_group, world, checkpoint
):
    config = CONFIGS["qwen3-moe"]
    config.num_experts = 8
    folder, on_rank_0 = checkpoint(config)
    ours = models.load_ours(folder, tensor_group, experts=ExpertRanks(num_parts))
    loads = ExpertLoads.of(ours, None)
    num_redundant = 8 * (num_parts - 1) if has_all else num_parts
    wanted = ExpertsConfig(rebalance_steps=2, num_redundant=num_redundant)
    balance_experts(ours, loads, wanted)
    seen = [placements(loads)]

    for prompt in models.prompts(40, 23, 9):
        logits = PagedRun(ours, 1).logits({0: prompt})
        for _ in range(wanted.rebalance_steps):
            loads.after_step()
        seen.append(placements(loads))

        expected = on_rank_0(
            lambda theirs, ids=prompt: theirs(torch.tensor([ids])).logits[0].detach()
        )
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)

    if has_all:
        # The placement before the first token.
        parts = [part for layer in seen[0] for part in layer]
        assert [sorted(part) for part in parts] == [list(range(8))] * len(parts)
        assert seen[0] == seen[-1]
    else:
        assert seen[0] != seen[1]
    assert all(each == seen for each in world.comm.allgather(seen))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("tp_size", "num_parts"), LAYOUTS)
def test_expert_work_of_tokens_is_divided_between_dp_ranks(tp_size, num_parts, world, tmp_path):
    config = CONFIGS["mixtral"]
    config.num_local_experts = 8
    config.save_pretrained(tmp_path)
    pretrained = EngineFolder.load(tmp_path, check_weights=False).config
    layout = ParallelLayout(rank=world.rank, tp_size=tp_size, dp_size=world.size // tp_size)
    tp, ranks = (
        connect_group(world.subgroup(each), CPU, timeout_s=30.0)
        for each in (layout.tp_ranks, layout.stage_ranks)
    )
    layer = make_layer(pretrained, torch.float32, tp, num_parts, ranks)
    whole = make_layer(pretrained, torch.float32, ShardPosition())
    loads = ExpertLoads({0: layer}, None, last_layer=0)
    context = LayerContext(tp, TorchOps(), torch.float32, CPU, 0, num_parts, ranks)
    balancer = loads.balancer = ExpertBalancer({0: layer}, loads, context, num_parts, 1)

    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + layout.dp_rank)
        # Data-parallel ranks have different tokens, and tokens of a dp rank are alike.
        x = torch.randn(1, pretrained.hidden_size, generator=generator).repeat(20, 1)
        x += 0.3 * torch.randn(x.shape, generator=generator)

        actual = layer.forward(x.clone(), x)

        expected = whole.forward(x.clone(), x)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
        before = balancer._placements[0]
        tokens = torch.from_numpy(loads.counts_LX.numpy() - balancer._seen_LX)
        every = ranks.all_reduce(tokens * (tp.rank == 0))[0].numpy()
        loads.after_step()
        after = balancer._placements[0]
        assert after.imbalance(every) <= before.imbalance(every) + 1e-9
        assert len({str(each) for each in world.comm.allgather(placements(loads))}) == 1
    for group in (tp, ranks):
        group.close()
