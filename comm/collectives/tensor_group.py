"""Tensor groups: the collectives on tensors that every transport implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch


class SumAndNorm(Protocol):
    """An all-reduce fused with the residual addition and the RMS norm that follow."""

    def takes(self, residual_TD: torch.Tensor) -> bool:
        """Whether the fused kernel serves such a residual; the same on all ranks."""
        ...

    def __call__(
        self, x: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add the ranks' sum of ``x`` into ``residual``; return the residual RMS-normalised.

        ``x`` is this rank's addend [T, D], or float32 parts [S, T, D] of it. Collective.
        """
        ...


class TensorParallelGroup(ABC):
    """Ranks that hold shards of the same layers.

    Every call is collective: all ranks of the group make the same calls in the same order with
    equal shapes and dtypes. All ranks get bit-identical results. Calls on CPU tensors return
    with the complete result. Calls on GPU tensors return when the operation is enqueued on the
    current stream.

    Raises (every call):
        PeerLostError: another rank missed the group's deadline.
    """

    rank: int
    size: int
    timeout_s: float
    """Longest wait for another rank; long while loading, the hang timeout afterwards.

    Shared memory honours changes. gloo and NCCL keep the value at connecting; there the
    watchdog of the process ends a shorter hang.
    """

    sum_norm: SumAndNorm | None = None
    """The fused all-reduce and norm, where one exists; set on all ranks alike."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place; returns ``tensor``.

        float16 and bfloat16 are summed in float32 on the CPU and rounded once.
        """

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The tensors of all ranks joined along ``dim`` in rank order, new memory."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite ``tensor`` with that of group rank ``src``; returns ``tensor``."""

    @abstractmethod
    def all_to_all(self, rows: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Send different rows to each rank; returns the received rows in rank order.

        ``rows`` holds the rows for rank 0, then the rows for rank 1 and so on. ``counts[i][j]``
        rows go from rank i to rank j; the table is the same on all ranks. The result is new
        memory.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank of the group is here."""

    @abstractmethod
    def transport_of(self, num_bytes: int) -> str:
        """The transport of an all-reduce of that size, for the log and the metrics."""

    def transports(self) -> dict[str, str]:
        """The transport of every collective, by size where that matters."""
        names = {size: self.transport_of(size) for size in (16 << 10, 64 << 20)}
        small, large = names.values()
        all_reduce = small if small == large else f"{small} (large: {large})"
        return {"all_reduce": all_reduce, "all_gather": large, "broadcast": large}

    def close(self) -> None:
        """Free the group's resources. Collective; the group is not used afterwards."""
        return


class SingleRankGroup(TensorParallelGroup):
    """A group of one rank: no data moves."""

    rank = 0
    size = 1
    timeout_s = 0.0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def all_to_all(self, rows: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        """A copy of the rows."""
        return rows.clone()

    def barrier(self) -> None:
        """Returns at once."""

    def transport_of(self, num_bytes: int) -> str:
        """No transport."""
        return "none"
