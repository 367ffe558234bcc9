"""Tensor collectives among real ranks, over every CPU transport."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.collectives.tensor_group import TensorParallelGroup
from trimaran.comm.errors import PeerLostError
from trimaran.comm.mpi import MPI, World

CPU = torch.device("cpu")
PLACES = ["one_host", "two_hosts"]
if torch.cuda.device_count() >= MPI.COMM_WORLD.Get_size():
    PLACES.append("gpus")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 7, 4096, 40_000, 262_144, 1_048_576)


@pytest.fixture(scope="module", params=PLACES)
def place(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def device(place, world) -> torch.device:
    return torch.device("cuda", world.local_rank) if place == "gpus" else CPU


@pytest.fixture(scope="module")
def group(place, device, world, two_host_world) -> TensorParallelGroup:
    chosen = two_host_world if place == "two_hosts" else world
    group = connect_group(chosen, device, timeout_s=30.0)
    yield group
    world.barrier(60.0, "end of a module")
    group.close()


def inputs(size: int, num_elements: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Every rank's input; the same list on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_elements, generator=generator).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", SIZES)
def test_all_reduce_gives_every_rank_the_same_bits_of_the_sum_in_rank_order(
    group, device, world, dtype, num_elements
):
    tensors = inputs(group.size, num_elements, dtype, seed=num_elements)
    total = np.zeros(num_elements, np.float32)
    for tensor in tensors:
        total = total + tensor.float().numpy()

    result = group.all_reduce(tensors[group.rank].to(device, copy=True)).cpu()

    expected = torch.from_numpy(total).to(dtype)
    assert result.dtype == dtype
    if group.transport_of(1) == "shared_memory":
        assert torch.equal(result, expected)
    else:
        torch.testing.assert_close(result, expected)
    bits = hashlib.sha256(result.view(torch.uint8).numpy()).digest()
    assert len(set(world.comm.allgather(bits))) == 1


def rows_for(source: int, target: int, count: int, width: int) -> torch.Tensor:
    """The data from rank ``source`` to rank ``target``; the same on all ranks."""
    generator = torch.Generator().manual_seed(100 * source + target)
    return torch.randn(count, width, generator=generator)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.uint8), ids=str)
@pytest.mark.parametrize(
    ("width", "unit"), [(1, 1), (5, 3), (4096, 150)], ids=["words", "rows", "several slots"]
)
def test_all_to_all_brings_each_rank_its_rows_in_rank_order(group, device, dtype, width, unit):
    # Uneven, and nothing at all between some.
    counts = [[(3 * i + j) % 4 * unit for j in range(group.size)] for i in range(group.size)]
    sent = [rows_for(group.rank, j, counts[group.rank][j], width) for j in range(group.size)]
    due = [rows_for(i, group.rank, counts[i][group.rank], width) for i in range(group.size)]

    received = group.all_to_all(torch.cat(sent).to(device, dtype), counts)

    assert received.cpu().equal(torch.cat(due).to(dtype))


def test_all_to_all_takes_part_with_nothing_to_send(group, device):
    counts = [[0] * group.size for _ in range(group.size)]
    counts[-1][0] = 2

    rows = torch.ones(2 if group.rank == group.size - 1 else 0, 3, device=device)
    received = group.all_to_all(rows, counts)

    assert received.shape == ((2 if group.rank == 0 else 0), 3)
    assert group.all_to_all(rows[:0], [[0] * group.size] * group.size).shape == (0, 3)


def test_all_reduce_writes_into_its_input(group, device):
    tensor = torch.ones(4, 6, device=device)
    strided = tensor[:, ::2]

    returned = group.all_reduce(strided)

    assert returned is strided
    assert torch.equal(tensor[:, ::2].cpu(), torch.full((4, 3), float(group.size)))
    assert torch.equal(tensor[:, 1::2].cpu(), torch.ones(4, 3))


@pytest.mark.parametrize("shape", [(3, 5), (300, 2000)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_joins_in_rank_order(group, device, shape, dim):
    row = torch.arange(shape[1], device=device)
    parts = [torch.full(shape, float(rank), device=device) + row for rank in range(group.size)]

    gathered = group.all_gather(parts[group.rank], dim)

    assert torch.equal(gathered, torch.cat(parts, dim))


@pytest.mark.parametrize("num_elements", [1, 1000, 3_000_000])
def test_broadcast_overwrites_the_tensors_of_other_ranks(group, device, num_elements):
    source = group.size - 1
    tensor = torch.full((num_elements,), group.rank, dtype=torch.int32, device=device)

    group.broadcast(tensor, src=source)

    assert torch.equal(tensor.cpu(), torch.full((num_elements,), source, dtype=torch.int32))


@pytest.mark.ranks(2)
def test_results_survive_later_calls_of_any_kind(group, device):
    kept = []
    for step in range(200):
        kept.append(group.all_reduce(torch.full((50,), float(step), device=device)))
        group.broadcast(torch.zeros(3, device=device), src=step % group.size)
        gathered = group.all_gather(torch.full((2,), float(group.rank), device=device))
        assert gathered.tolist() == [float(r) for r in range(group.size) for _ in range(2)]
    group.barrier()

    assert [float(t[0]) for t in kept] == [float(step * group.size) for step in range(200)]


def test_a_group_names_its_transport(group, place):
    expected = {"one_host": "shared_memory", "two_hosts": "gloo", "gpus": "nccl"}[place]

    assert set(group.transports().values()) == {expected}


@pytest.mark.ranks(4)
def test_a_missing_rank_is_named_after_the_deadline(world: World):
    # Operators know the rank by its world rank, not by its number in the group.
    backwards = world.subgroup(tuple(reversed(range(world.size))))
    group = connect_group(backwards, CPU, timeout_s=1.0)
    missing = world.size - 1
    world.barrier(60.0, "all connected")

    if world.rank == missing:
        world.barrier(60.0, "the others gave up")
        return
    with pytest.raises(PeerLostError, match=rf"rank\(s\) \[{missing}\] did not"):
        group.all_reduce(torch.ones(8))
    world.barrier(60.0, "the others gave up")


def test_a_busy_core_does_not_put_off_the_deadline(world: World, monkeypatch):
    """Where other processes run, one yield takes as long as they like."""
    group = connect_group(world.subgroup(tuple(range(world.size))), CPU, timeout_s=0.5)
    world.barrier(60.0, "all connected")
    if world.rank == 0:
        world.barrier(60.0, "the others gave up")
        return
    durations_s = []

    def slow_yield():
        durations_s.append(0.02)
        time.sleep(durations_s[-1])

    with monkeypatch.context() as patch, pytest.raises(PeerLostError):
        patch.setattr(os, "sched_yield", slow_yield)
        group.all_reduce(torch.ones(8))
    assert sum(durations_s) < group.timeout_s
    world.barrier(60.0, "the others gave up")


def test_separate_groups_do_not_mix_messages(world: World):
    halves = [tuple(range(world.size // 2)), tuple(range(world.size // 2, world.size))]
    own = halves[world.rank >= world.size // 2]

    group = connect_group(world.subgroup(own), CPU, timeout_s=30.0)
    result = group.all_reduce(torch.tensor([float(world.rank)]))

    assert result.item() == sum(own)


@pytest.fixture(scope="module")
def gloo_groups(
    two_host_world: World,
) -> Iterator[list[tuple[tuple[int, ...], TensorParallelGroup]]]:
    """Groups by ranks: this process's half of all ranks, one rank of each half, and all
    ranks."""
    world = two_host_world
    half = world.size // 2
    first = tuple(range(half)) if world.rank < half else tuple(range(half, world.size))
    across = tuple(rank for rank in range(world.size) if rank % half == world.rank % half)
    groups = [
        connect_group(world.subgroup(ranks), CPU, timeout_s=30.0) for ranks in (first, across)
    ]
    groups.append(connect_group(world, CPU, timeout_s=30.0))
    yield [(first, groups[0]), (across, groups[1]), (tuple(range(world.size)), groups[2])]
    world.barrier(60.0, "end of a module")
    for group in groups:
        group.close()


def test_a_process_is_in_several_groups_over_gloo_at_once(two_host_world: World, gloo_groups):
    own = torch.tensor([float(two_host_world.rank)])

    sums = [group.all_reduce(own.clone()).item() for _, group in gloo_groups]

    assert sums == [sum(ranks) for ranks, _ in gloo_groups]
    (_, _), (across, group), _ = gloo_groups
    assert group.broadcast(own.clone(), src=1).item() == across[1]


@pytest.mark.ranks(4)
def test_groups_are_created_and_destroyed_beside_other_groups(
    two_host_world: World, gloo_groups
):
    for _ in range(5):
        group = connect_group(two_host_world, CPU, timeout_s=10.0)
        assert group.all_reduce(torch.ones(1)).item() == two_host_world.size
        group.close()

    *_, (ranks, group) = gloo_groups
    assert group.all_reduce(torch.ones(1)).item() == len(ranks)


@pytest.mark.ranks(4)
def test_a_wait_over_gloo_ends_at_the_current_deadline_and_names_the_other_ranks(
    two_host_world: World, gloo_groups
):
    world, (_, group) = two_host_world, gloo_groups[-1]
    missing = world.size - 1
    group.timeout_s = 0.5
    world.barrier(60.0, "all connected")

    if world.rank != missing:
        others = [rank for rank in range(world.size) if rank != world.rank]
        words = rf"with rank\(s\) {re.escape(str(others))}, over the network, within 0\.5 s"
        start = time.monotonic()
        with pytest.raises(PeerLostError, match=words):
            group.all_reduce(torch.ones(8))
        assert time.monotonic() - start < 25.0
    world.barrier(60.0, "the others gave up")
    if world.rank == missing:
        # The calls of other ranks end before the group ends.
        group.timeout_s = 30.0
        group.all_reduce(torch.ones(8))
    world.barrier(60.0, "the last one came")
