"""The world of ranks: places, subgroups and barriers."""

from __future__ import annotations

import pytest

from trimaran.comm import mpi
from trimaran.comm.errors import PeerLostError


def test_local_ranks_count_within_a_host(world, two_host_world):
    assert world.local_rank == world.rank
    assert two_host_world.local_rank == world.rank // 2


def test_a_subgroup_is_renumbered_in_order(world):
    ranks = tuple(range(world.rank % 2, world.size, 2))

    group = world.subgroup(ranks)

    assert group.size == len(ranks)
    assert ranks[group.rank] == world.rank


def test_participants_keep_the_given_order_and_other_ranks_stay_single(world):
    participants = tuple(reversed(range(1, world.size)))

    group = world.subgroup((world.rank,) if world.rank == 0 else participants)

    numbers = tuple(group.comm.allgather(world.rank))
    assert numbers == ((0,) if world.rank == 0 else participants)
    assert numbers[group.rank] == world.rank


def test_a_failed_barrier_names_its_purpose(world):
    late = world.duplicate()
    if world.rank != 0:
        with pytest.raises(PeerLostError, match="'weights loaded'"):
            mpi.World(late, world.rank, world.size, world.hosts).barrier(0.1, "weights loaded")
    world.barrier(60.0, "the others gave up")
    if world.rank == 0:
        late.Ibarrier().Wait()
    world.barrier(60.0, "end")


def test_the_library_grants_threads(world):
    mpi.require_threads()
