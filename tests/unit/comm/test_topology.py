"""Coordinates, neighbours and refusals of the parallel layout."""

from __future__ import annotations

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.comm.topology import Coord, ParallelLayout


def test_ranks_of_a_tensor_group_are_neighbours():
    layout = ParallelLayout(rank=5, tp_size=4, pp_size=2)

    assert layout.coord == Coord(pp=1, tp=1)
    assert layout.tp_ranks == (4, 5, 6, 7)
    assert layout.pp_ranks == (1, 5)


def test_every_rank_has_its_own_coordinates():
    layout = ParallelLayout(tp_size=2, pp_size=3)

    coords = [layout.coord_of(rank) for rank in range(6)]

    assert coords == [Coord(pp=pp, tp=tp) for pp in range(3) for tp in range(2)]


def test_a_dp_rank_is_a_pipeline_of_tensor_groups_and_stages_go_through_all_dp_ranks():
    layout = ParallelLayout(rank=10, tp_size=2, pp_size=2, dp_size=3)

    assert layout.coord == Coord(pp=1, tp=0, dp=2)
    assert layout.tp_ranks == (10, 11)
    assert layout.pp_ranks == (8, 10)
    assert layout.stage_ranks == (2, 3, 6, 7, 10, 11)
    assert len({layout.coord_of(rank) for rank in range(12)}) == 12


def test_local_ranks_count_per_host():
    layout = ParallelLayout(rank=3, tp_size=4, hosts=("a", "b", "a", "b"))

    assert layout.local_ranks == (1, 3)
    assert layout.local_rank == 1
    assert layout.num_hosts == 2


def test_tensor_groups_that_span_hosts_are_known():
    near = ParallelLayout(tp_size=2, pp_size=2, hosts=("a", "a", "b", "b"))
    far = ParallelLayout(tp_size=2, dp_size=2, hosts=("a", "b", "b", "b"))

    assert near.split_tensor_groups == []
    assert far.split_tensor_groups == [(0, 1)]


def test_a_world_of_the_wrong_size_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"3 rank\(s\) were started .* needs 4"):
        ParallelLayout(rank=0, tp_size=2, pp_size=2, hosts=("a",) * 3)
