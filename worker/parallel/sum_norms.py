"""All-reduce fused with the following norm, enabled for a tensor group after a check."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimaran.comm.collectives.tensor_group import TensorParallelGroup
from trimaran.comm.collectives.torch_groups import NcclGroup, map_peer_memory
from trimaran.comm.errors import ConfigError
from trimaran.kernels.build import KernelsUnavailableError
from trimaran.kernels.cuda.build import check_compiler
from trimaran.worker.config.engine_config import EngineConfig
from trimaran.worker.parallel.peer_sums import choose_sums, first_problem, sum_of_gathered

if TYPE_CHECKING:
    from trimaran.kernels.cuda.sum_norm import SumNorm

logger = logging.getLogger(__name__)

# Shapes: T tokens of the step, D hidden size, S parts of a product.

MAX_ROWS = {2: 256, 4: 64, 8: 32}
"""By number of ranks: most rows of a step for the fused kernel. Each row is sent to every rank
at twice its bytes; the peer-memory all-reduce serves larger steps."""

FEW_ROWS = {2: 192, 4: 16}
"""By number of ranks: most rows for which the fused kernel is faster. Two GPUs need two thirds
of the time for 64 rows, and 97 % for 192. Eight GPUs were not measured."""

_HOPPER = (9, 0)
_EPS = 1e-5
_NUM_REPLAYS = 5
_CHECKED = (
    (torch.bfloat16, 4096, 0),
    (torch.bfloat16, 4096, 4),
    (torch.bfloat16, 8192, 0),
    (torch.float32, 2048, 0),
)
"""Dtype, width and parts of the sums in the check before the first request. They cover all
divisions of a row: a thread does the work of one or two threads of the norm kernel, on 16 or
32 bytes."""


def choose_sums_and_norms(
    config: EngineConfig, group: TensorParallelGroup, device: torch.device
) -> None:
    """Set the configured all-reduce of a tensor group. The all-reduce is fused with norms if
    configured, or if the choice is automatic and fusion is faster. Collective.

    Raises:
        ConfigError: the requested all-reduce is not possible.
    """
    choose_sums(config, group, device)
    limits = {"auto": FEW_ROWS, "fused": MAX_ROWS}.get(config.all_reduce)
    if limits is None or not isinstance(group, NcclGroup) or group.peer_sum is None:
        return
    # With exact norms rows have the same bits with and without fusion. Otherwise `auto` must
    # not choose by the number of rows.
    reason = try_sum_norm(group, limits, is_exact=config.deterministic)
    if reason and config.all_reduce == "fused":
        raise ConfigError(
            f"--all-reduce fused sums together with norms, but {reason}. Serve with "
            "--all-reduce auto, peer or nccl."
        )
    if reason:
        logger.info("no sums are made by the norms behind them: %s", reason)


def try_sum_norm(group: NcclGroup, limits: Mapping[int, int], *, is_exact: bool = False) -> str:
    """Let GPUs that map each other's memory sum small steps together with the following norm.

    Returns the reason why not; empty if enabled. Collective; all ranks return the same.
    ``limits`` are the tokens of a step by number of ranks.

    A kernel waits for other ranks as in `peer_sums.try_peer_sums`. Sums and norms are first
    compared, launched and from a CUDA graph. With ``is_exact`` norms must be bit-identical,
    which holds if Triton adds up a row in the order of the fused kernel.
    """
    problem = first_problem(group, _why_there_is_no_kernel(group, limits), group.device)
    if problem:
        return problem
    # Imported late, because a CPU needs neither this module nor Triton.
    from trimaran.kernels.cuda.sum_norm import SumNorm, region_bytes

    max_rows = limits[group.size]
    sum_norm: SumNorm | None = None
    try:
        memory = map_peer_memory(group, region_bytes(group.size, max_rows))
        addresses = memory.addresses
        sum_norm = SumNorm(addresses, group.rank, max_rows, group.device, memory)
        for dtype, width, _ in _CHECKED:
            # Compile first: a rank whose compilation fails must not leave others inside a
            # kernel.
            sum_norm.load(dtype, width)
    except (ConfigError, RuntimeError) as error:
        # Either no compiler takes the source, or the driver refuses the compiled kernel.
        problem = str(error)
    problem = first_problem(group, problem, group.device)
    if sum_norm is not None and not problem:
        found = check_sum_norm(group, sum_norm, max_rows, is_exact=is_exact)
        problem = first_problem(group, found, group.device)
        if problem:
            logger.warning("sums by the norms behind them are wrong here: %s", problem)
    if not problem:
        group.sum_norm = sum_norm
        logger.info("sums of up to %d tokens are made by the norms behind them", max_rows)
    return problem


def _why_there_is_no_kernel(group: NcclGroup, limits: Mapping[int, int]) -> str:
    if group.size not in limits:
        return f"the group has {group.size} ranks and may have {', '.join(map(str, limits))}"
    if torch.cuda.get_device_capability(group.device) != _HOPPER:
        return f"there is no kernel for {torch.cuda.get_device_name(group.device)}"
    try:
        check_compiler()
    except KernelsUnavailableError as error:
        return str(error)
    return ""


def check_sum_norm(
    group: NcclGroup, sum_norm: SumNorm, max_rows: int, *, is_exact: bool = True
) -> str:
    """Compare sums and norms of random numbers with NCCL's gathered sums and the separate norm.

    Sums must be bit-identical, and norms too with ``is_exact``. Collective.

    Returns this rank's first difference; empty if there is none.
    """
    generator = torch.Generator(group.device).manual_seed(group.rank + 1)
    found: list[str] = []
    for dtype, width, parts in _CHECKED:
        for rows in (max_rows, 1, 3, max_rows):
            sample = _Sample((parts, rows, width), dtype, group.device)
            sample.draw(generator)
            expected = sample.expected(group)
            normed = sum_norm(sample.x, sample.residual, sample.weight, _EPS)
            outcome = normed, sample.residual
            found += _differences(outcome, expected, f"{rows} x {width}", is_exact)
    samples = [_Sample((4, rows, 4096), torch.bfloat16, group.device) for rows in (max_rows, 2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = [sum_norm(each.x, each.residual, each.weight, _EPS) for each in samples]
    for _ in range(_NUM_REPLAYS):
        for sample in samples:
            sample.draw(generator)
        all_expected = [sample.expected(group) for sample in samples]
        graph.replay()
        for sample, normed, expected in zip(samples, outputs, all_expected, strict=True):
            found += _differences((normed, sample.residual), expected, "a graph", is_exact)
    # Free the graph only after the device has finished it.
    torch.cuda.synchronize(group.device)
    return found[0] if found else ""


class _Sample:
    """One rank's random arguments of a fused sum and norm: (parts or 0, rows, width)."""

    def __init__(
        self, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        parts, rows, width = sizes
        shape, of_x = ((parts, rows, width), torch.float32) if parts else ((rows, width), dtype)
        self.x = torch.empty(shape, dtype=of_x, device=device)
        self.residual = torch.empty((rows, width), dtype=dtype, device=device)
        self.weight = torch.empty(width, dtype=dtype, device=device)

    def draw(self, generator: torch.Generator) -> None:
        """Draw new numbers, in place."""
        for tensor in (self.x, self.residual, self.weight):
            tensor.normal_(generator=generator)

    def expected(self, group: NcclGroup) -> tuple[Tensor, Tensor]:
        """The expected norm and residual. Collective."""
        from trimaran.kernels.triton.norm import rms_norm

        addend = self.x
        if addend.dim() == 3:
            # Parts are added in order, like in every kernel that adds up parts.
            total = addend[0]
            for part in addend[1:]:
                total = total + part
            addend = total.to(self.residual.dtype)
        residual = self.residual.clone()
        return rms_norm(sum_of_gathered(group, addend), self.weight, _EPS, residual), residual


def _differences(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], what: str, is_exact: bool
) -> list[str]:
    """Text of the differences of norm and sum. Never raises, because other ranks would wait."""
    texts = []
    for name, ours, theirs in zip(("norm", "sum"), found, expected, strict=True):
        if torch.equal(ours, theirs):
            continue
        difference = (ours.float() - theirs.float()).abs()
        # Another order of the squares may change the rounding of a norm.
        is_rounding = difference <= (2 * torch.finfo(ours.dtype).eps + 1e-5) * theirs.abs()
        if name == "sum" or is_exact or not bool(is_rounding.all()):
            texts.append(f"the {name} of {what} differs by {difference.max():.3g}")
    return texts
