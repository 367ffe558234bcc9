"""Sums through memory that all ranks map, by the GPU's kernels: Triton runs them on the CPU."""

from __future__ import annotations

import pytest
import torch

from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.collectives.torch_groups import why_memory_is_apart
from trimaran.comm.errors import ConfigError
from trimaran.comm.transport.shared_memory import SharedSegment
from trimaran.kernels.triton.peer_sum import TILE, PeerSum, region_bytes
from trimaran.worker.config.engine_config import EngineConfig
from trimaran.worker.parallel.peer_sums import first_problem, try_peer_sums
from trimaran.worker.parallel.sum_norms import choose_sums_and_norms

SLOT_BYTES = 64 << 10
HAS_GPUS = torch.cuda.device_count() > 1
"""Then GPUs map each other's memory, and the kernels are compiled."""
SUMS = (
    (1, torch.float32),
    (TILE + 1, torch.float16),
    (3, torch.float32),
    (40_000, torch.float16),
)
"""The last is larger than a slot."""


@pytest.fixture(scope="module")
def regions(world):
    """Zeroed memory of every rank, as mapped by this rank."""
    own = SharedSegment.create(region_bytes(world.size, SLOT_BYTES))
    handles = world.comm.allgather(own.handle)
    segments = [
        own if rank == world.rank else SharedSegment.attach(handle)
        for rank, handle in enumerate(handles)
    ]
    world.comm.Barrier()
    return segments


@pytest.mark.ranks(4)
@pytest.mark.parametrize("one_shot_bytes", [0, 20 << 10])
def test_sums_are_those_in_rank_order_rounded_once(world, regions, one_shot_bytes):
    if HAS_GPUS:
        return
    addresses = [segment.address for segment in regions]
    world.comm.Barrier()
    for segment in regions:
        segment.map[:] = bytes(len(segment.map))
    world.comm.Barrier()
    # Programs so few that each has several tiles.
    sums = PeerSum(
        addresses,
        world.rank,
        SLOT_BYTES,
        one_shot_bytes,
        torch.device("cpu"),
        takes_any=True,
        num_programs=2,
    )

    for size, dtype in SUMS:
        generator = torch.Generator().manual_seed(size)
        parts = torch.randn(world.size, size, generator=generator).to(dtype)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        own = parts[world.rank].clone()

        assert sums.takes(own)
        sums(own)

        assert torch.equal(own, total.to(dtype))


@pytest.mark.ranks(2)
def test_only_float_tensors_of_supported_sizes_are_accepted():
    sums = PeerSum([0, 0], 0, 1024, 512, torch.device("cpu"))

    assert sums.takes(torch.zeros(256))
    assert not sums.takes(torch.zeros(257))
    assert not sums.takes(torch.zeros(8, dtype=torch.int64))
    assert not sums.takes(torch.zeros(0))
    assert [sums.way_of(size) for size in (512, 513, 1025)] == ["one-shot", "two-shot", ""]


def test_peer_sums_serve_on_gpus_after_a_comparison_with_nccl(world):
    if not HAS_GPUS:
        group = connect_group(world, torch.device("cpu"), 20.0)
        assert try_peer_sums(group, takes_any=False) == "this group uses shared_memory"
        return
    device = torch.device("cuda", world.local_rank)
    group = connect_group(world, device, 60.0)
    assert why_memory_is_apart(group) == ""
    assert try_peer_sums(group, takes_any=False, is_requested=False) == ""

    found = group.all_reduce(torch.full((5000,), float(world.rank), device=device))

    assert group.transports()["all_reduce"] == "peer one-shot (large: nccl)"
    assert found.tolist() == [float(sum(range(world.size)))] * 5000
    group.close()


def test_a_problem_of_a_rank_is_reported_to_all_ranks(world):
    if HAS_GPUS:
        return
    group, device = connect_group(world, torch.device("cpu"), 20.0), torch.device("cpu")
    last = world.size - 1

    found = first_problem(group, f"GPU {last} is tired" * (world.rank == last), device)

    assert found == f"GPU {last} is tired"
    assert first_problem(group, "", device) == ""
    assert first_problem(group, "long " * 1000, device).startswith("long long")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("asked", ["auto", "nccl", "peer", "fused"])
def test_unavailable_peer_sums_are_refused_only_when_requested_explicitly(world, asked):
    if HAS_GPUS:
        return
    group = connect_group(world, torch.device("cpu"), 20.0)
    config = EngineConfig(model="test", engine_dir="/m", all_reduce=asked)
    if asked in ("peer", "fused"):
        with pytest.raises(
            ConfigError, match=r"but this group uses shared_memory\. Serve with"
        ):
            choose_sums_and_norms(config, group, torch.device("cpu"))
        return

    choose_sums_and_norms(config, group, torch.device("cpu"))

    assert group.sum_norm is None
    total = group.all_reduce(torch.ones(3))
    assert total.tolist() == [float(world.size)] * 3
