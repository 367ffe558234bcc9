"""Tensor groups of GPUs that sum through each other's memory, once they have shown they can."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from trimaran.comm.collectives import TensorParallelGroup
from trimaran.comm.errors import ConfigError
from trimaran.comm.peer_memory import map_peer_memory
from trimaran.comm.process_group import NcclGroup, SumInPlace
from trimaran.worker.config import EngineConfig

logger = logging.getLogger(__name__)

SLOT_BYTES = {2: 16 << 20, 4: 8 << 20, 8: 2 << 20}
"""By ranks: the largest tensor that is summed through peers' memory."""

ONE_SHOT_BYTES = {2: 16 << 20, 4: 512 << 10, 8: 256 << 10}
"""By ranks: up to here every rank reads all of it from all. Two ranks move no more that way."""

_NUM_REPLAYS = 5
_CHECKED = (1, 1000, 4096, 100_000)
"""Elements of the tensors that are summed before the first request, beside the largest."""


def choose_sums(config: EngineConfig, group: TensorParallelGroup, device: torch.device) -> None:
    """Let a tensor group sum as the configuration asks. Collective.

    Raises:
        ConfigError: see `use_peer_sums`.
    """
    if config.all_reduce == "peer" and group.size > 1:
        use_peer_sums(group, takes_any=config.deterministic)
    elif config.deterministic and device.type == "cuda" and group.size > 2:
        logger.warning(
            "deterministic with tp_size %d: the order of NCCL's sums depends on the number of "
            "tokens in a step. Serve with --all-reduce peer for one order",
            group.size,
        )


def use_peer_sums(group: TensorParallelGroup, *, takes_any: bool) -> None:
    """Let a group of GPUs sum smaller tensors through each other's memory, or ``takes_any``.
    Collective.

    Sums are compared with NCCL's first, launched and from a CUDA graph.

    Raises:
        ConfigError: the group has other ranks than such sums were made for, its GPUs cannot
            map each other's memory, or a sum is wrong.
    """
    if not isinstance(group, NcclGroup):
        raise ConfigError(
            f"--all-reduce peer sums over the GPUs of a tensor group, but this group uses "
            f"{group.transport_of(1)}. Serve with --all-reduce nccl."
        )
    if group.num_hosts > 1:
        raise ConfigError(
            "--all-reduce peer sums over GPUs of one host, but the tensor group spans "
            f"{group.num_hosts}. Serve with --all-reduce nccl, or with a smaller --tp-size."
        )
    if group.size not in SLOT_BYTES:
        raise ConfigError(
            f"--all-reduce peer sums over {', '.join(map(str, SLOT_BYTES))} ranks, but the "
            f"tensor group has {group.size}. Serve with --all-reduce nccl."
        )
    # Imported only now: a CPU needs no Triton.
    from trimaran.kernels.triton_peer_sum import PeerSum, region_bytes

    slot_bytes = SLOT_BYTES[group.size]
    memory = map_peer_memory(group, region_bytes(group.size, slot_bytes))
    peer_sum = PeerSum(
        memory.addresses,
        group.rank,
        slot_bytes,
        ONE_SHOT_BYTES[group.size],
        group.device,
        memory,
        takes_any=takes_any,
    )
    check_sums(group, peer_sum)
    group.peer_sum = peer_sum
    logger.info("sums of up to %d MiB over peers' memory", slot_bytes >> 20)


def check_sums(group: NcclGroup, peer_sum: SumInPlace) -> None:
    """Compare sums of random numbers with those of what NCCL gathers. Collective.

    Raises:
        ConfigError: they differ.
    """
    generator = torch.Generator(group.device).manual_seed(group.rank + 1)
    for dtype in (torch.bfloat16, torch.float32):
        largest = SLOT_BYTES[group.size] // dtype.itemsize
        for count in (*_CHECKED, largest):
            x = torch.empty(count, dtype=dtype, device=group.device)
            x.normal_(generator=generator)
            expected = _sum_of_gathered(group, x)
            peer_sum(x)
            _compare(x, expected, f"{count} {dtype}")
    x = torch.empty(100_000, dtype=torch.bfloat16, device=group.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        peer_sum(x)
        once = x.clone()
        peer_sum(x)
    for _ in range(_NUM_REPLAYS):
        x.normal_(generator=generator)
        expected = _sum_of_gathered(group, x)
        graph.replay()
        _compare(once, expected, "a graph's first")
        _compare(x, _sum_of_gathered(group, expected), "a graph's second")
    # The graph is freed only when the device has finished it.
    torch.cuda.synchronize(group.device)


def _sum_of_gathered(group: NcclGroup, x: Tensor) -> Tensor:
    """The sum in rank order, in float32 and rounded once."""
    parts = group.all_gather(x[None], 0).float()
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)


def _compare(found: Tensor, expected: Tensor, what: str) -> None:
    if not torch.equal(found, expected):
        difference = (found.float() - expected.float()).abs().max()
        raise ConfigError(
            f"--all-reduce peer: the sum of {what} differs from NCCL's by {difference:.3g} on "
            "these GPUs. Serve with --all-reduce nccl."
        )
