"""When ranks wait for each other, the rank that waits for the lost rank gives up first."""

from __future__ import annotations

import itertools

import pytest

from trimaran.comm.deadlines import StepTimeouts
from trimaran.comm.topology import ParallelLayout


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 2), (1, 16, 1)])
def test_deadlines_grow_along_chains_of_waiting_ranks_and_stay_below_the_watchdog(
    sizes,
):
    tp_size, pp_size, dp_size = sizes
    layouts = [
        ParallelLayout(rank=rank, tp_size=tp_size, pp_size=pp_size, dp_size=dp_size)
        for rank in range(tp_size * pp_size * dp_size)
    ]
    stages = [
        [StepTimeouts.of(lo, 10.0) for lo in layouts if lo.pp_rank == s] for s in range(pp_size)
    ]

    assert all(len(set(waits)) == 1 for waits in stages)
    waits = [waits[0] for waits in stages]
    chain = [(each.hidden_s, each.tensor_s, each.experts_s) for each in waits]
    in_order = [*itertools.chain(*chain), waits[0].results_s]
    assert in_order == sorted(set(in_order))
    assert len({each.results_s for each in waits}) == 1
    assert in_order[0] > 5.0 and in_order[-1] < 9.0
