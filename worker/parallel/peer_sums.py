"""All-reduce through peers' GPU memory, enabled for a tensor group after a check."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from trimaran.comm.collectives.tensor_group import TensorParallelGroup
from trimaran.comm.collectives.torch_groups import (
    NcclGroup,
    SumInPlace,
    map_peer_memory,
    why_memory_is_apart,
)
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_config import EngineConfig

logger = logging.getLogger(__name__)

SLOT_BYTES = {2: 16 << 20, 4: 8 << 20, 8: 2 << 20}
"""By number of ranks: bytes of the largest tensor that is summed through peers' memory."""

ONE_SHOT_BYTES = {2: 16 << 20, 4: 512 << 10, 8: 256 << 10}
"""By number of ranks: bytes up to which every rank reads all tensors whole (one-shot). With
two ranks this moves no more bytes."""

_TEXT_BYTES = 512
_NUM_REPLAYS = 5
_CHECKED = (1, 1000, 4096, 100_000)
"""Elements of the tensors in the check before the first request, besides the largest."""


def choose_sums(config: EngineConfig, group: TensorParallelGroup, device: torch.device) -> None:
    """Set the configured all-reduce of a tensor group. Collective.

    Raises:
        ConfigError: the configuration asks for peer-memory sums, which are not possible.
    """
    if group.size == 1:
        return
    reason = "as --all-reduce says"
    if config.all_reduce != "nccl":
        is_requested = config.all_reduce != "auto"
        reason = try_peer_sums(group, takes_any=config.deterministic, is_requested=is_requested)
        if reason and is_requested:
            raise ConfigError(
                f"--all-reduce {config.all_reduce} sums through the memory of a tensor "
                f"group's GPUs, but {reason}. Serve with --all-reduce auto or nccl."
            )
    if not reason or device.type != "cuda":
        return
    logger.info("sums by NCCL: %s", reason)
    if config.deterministic and group.size > 2:
        logger.warning(
            "deterministic with tp_size %d: the order of NCCL's sums depends on the number of "
            "tokens in a step. Only --all-reduce peer has one order, where it is served",
            group.size,
        )


def try_peer_sums(
    group: TensorParallelGroup, *, takes_any: bool, is_requested: bool = True
) -> str:
    """Let a group of GPUs sum tensors through peer memory: small tensors, or all with
    ``takes_any``.

    Returns the reason why not; empty if enabled. Collective; all ranks return the same. The
    sums are first compared with NCCL's, launched and from a CUDA graph. Without
    ``is_requested`` this is tried only on GPUs that report support.

    A kernel waits for the other ranks without a time limit. If a rank dies, the watchdogs of
    the other ranks report a hang, and the supervisor ends the group with SIGKILL. The driver
    then removes the kernels from the GPU, even if they spin. Memory that other processes have
    mapped stays until they end, so no rank reads freed memory.
    """
    if not isinstance(group, NcclGroup):
        return f"this group uses {group.transport_of(1)}"
    if group.num_hosts > 1:
        return f"the group spans {group.num_hosts} hosts and may span 1"
    if group.size not in SLOT_BYTES:
        sizes = ", ".join(map(str, SLOT_BYTES))
        return f"the group has {group.size} ranks and may have {sizes}"
    problem = (
        "" if is_requested else first_problem(group, why_memory_is_apart(group), group.device)
    )
    if problem:
        return problem
    slot_bytes = SLOT_BYTES[group.size]
    peer_sum: SumInPlace | None = None
    try:
        peer_sum = _make_peer_sum(group, slot_bytes, takes_any)
    except ConfigError as error:
        problem = str(error)
    problem = first_problem(group, problem, group.device)
    if peer_sum is not None and not problem:
        problem = first_problem(group, check_sums(group, peer_sum), group.device)
        if problem:
            logger.warning("sums over peers' memory are wrong here: %s", problem)
    if not problem:
        group.peer_sum = peer_sum
        logger.info("sums of up to %d MiB over peers' memory", slot_bytes >> 20)
    return problem


def _make_peer_sum(group: NcclGroup, slot_bytes: int, takes_any: bool) -> SumInPlace:
    # Imported late, because a CPU needs no Triton.
    from trimaran.kernels.triton.peer_sum import PeerSum, region_bytes

    memory = map_peer_memory(group, region_bytes(group.size, slot_bytes))
    return PeerSum(
        memory.addresses,
        group.rank,
        slot_bytes,
        ONE_SHOT_BYTES[group.size],
        group.device,
        memory,
        takes_any=takes_any,
    )


def first_problem(group: TensorParallelGroup, problem: str, device: torch.device) -> str:
    """The problem of the first rank with a problem, equal on all ranks; empty without a
    problem. Collective.
    """
    text = problem.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    own = torch.tensor(list(text), dtype=torch.uint8, device=device)
    every = group.all_gather(own[None], 0).tolist()
    texts = (bytes(row).rstrip(b"\0").decode(errors="ignore") for row in every)
    return next((each for each in texts if each), "")


def check_sums(group: NcclGroup, peer_sum: SumInPlace) -> str:
    """Compare sums of random numbers with sums of tensors gathered by NCCL. Collective.

    Returns this rank's first difference; empty if there is none.
    """
    generator = torch.Generator(group.device).manual_seed(group.rank + 1)
    found: list[str] = []
    for dtype in (torch.bfloat16, torch.float32):
        largest = SLOT_BYTES[group.size] // dtype.itemsize
        for count in (*_CHECKED, largest):
            x = torch.empty(count, dtype=dtype, device=group.device)
            x.normal_(generator=generator)
            expected = sum_of_gathered(group, x)
            peer_sum(x)
            found += _differences(x, expected, f"{count} {dtype}")
    x = torch.empty(100_000, dtype=torch.bfloat16, device=group.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        peer_sum(x)
        once = x.clone()
        peer_sum(x)
    for _ in range(_NUM_REPLAYS):
        x.normal_(generator=generator)
        expected = sum_of_gathered(group, x)
        graph.replay()
        found += _differences(once, expected, "a graph's first")
        found += _differences(x, sum_of_gathered(group, expected), "a graph's second")
    # Free the graph only after the device has finished it.
    torch.cuda.synchronize(group.device)
    return found[0] if found else ""


def sum_of_gathered(group: NcclGroup, x: Tensor) -> Tensor:
    """The sum in rank order, in float32 and rounded once."""
    parts = group.all_gather(x[None], 0).float()
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)


def _differences(found: Tensor, expected: Tensor, what: str) -> list[str]:
    """Text of the difference, if any. Never raises, because other ranks would wait."""
    if torch.equal(found, expected):
        return []
    difference = (found.float() - expected.float()).abs().max()
    return [f"the sum of {what} differs from NCCL's by {difference:.3g}"]
