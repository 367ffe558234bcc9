"""Rank 0 reports the tokens of every expert, whichever stage or dp rank has counted them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.mpi.test_data_parallel import NUM_RANKS, PROMPTS, DataParallelRanks, models, single  # noqa: F401

# Tensor-parallel ranks, stages and expert-parallel parts; dp ranks use the remaining ranks.
LAYOUTS = [("qwen2-moe", 1, 2, 1), ("mixtral", 1, 1, 2)]
if NUM_RANKS == 4:
    LAYOUTS = [("qwen2-moe", 1, 2, 2)]


def serve(driver) -> dict[int, list[int]]:
    """Tokens of each layer's experts, once twice as many prompts as there are have run."""
    reports = []
    for _ in range(2):
        for prompt in PROMPTS:
            driver.submit(prompt, max_tokens=6)
        while driver.engine.has_work:
            driver.step()
            reports.append(driver.engine.expert_report())
        reports.append(driver.engine.expert_report())
    last = reports[-1]
    counts = np.frombuffer(last.counts, "<i8").reshape(len(last.layers), -1)
    return dict(zip(last.layers, counts.tolist(), strict=True))


@pytest.mark.parametrize(("name", "tp_size", "pp_size", "moe_ep_size"), LAYOUTS)
def test_expert_counts_of_stages_and_dp_ranks_equal_those_of_one_rank(
    name, tp_size, pp_size, moe_ep_size, world, models  # noqa: F811
):  # fmt: skip
    folder = models[0][name]

    counts = DataParallelRanks(world, folder, tp_size, pp_size, moe_ep_size).drive(serve)

    if world.rank == 0:
        expected = single(folder, serve)
        first, *_, last = expected
        assert sum(expected[last]) < sum(expected[first])
        if moe_ep_size > 1:
            # Dp ranks with divided experts run all tokens through the last layer. A single rank
            # runs only the sampled tokens.
            assert sum(counts[last]) == sum(counts[first])
            expected[last] = counts[last]
        assert counts == expected
        assert len(counts) == (2 if name == "qwen2-moe" else 3)
