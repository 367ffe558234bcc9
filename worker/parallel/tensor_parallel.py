"""The tensor-parallel group as layers see it, and outputs whose all-reduce is pending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trimaran.comm.collectives.tensor_group import SumAndNorm

MAX_TO_ALL = 128
"""Most tokens of a dp rank for which an all-gather without counts serves all ranks."""


@dataclass(slots=True)
class TokensAcrossDP:
    """The token count of the largest data-parallel rank, which the runner sets for the
    layers."""

    most_tokens: int = 0
    """Over all data-parallel ranks; 0 if unknown."""


class TensorGroup(Protocol):
    """The tensor-parallel group; all ranks make its collective calls in one order."""

    @property
    def rank(self) -> int:
        """This rank within the group."""
        ...

    @property
    def size(self) -> int:
        """Ranks of the group; with 1 every call is a no-op."""
        ...

    @property
    def sum_norm(self) -> SumAndNorm | None:
        """The all-reduce fused with the following norm; None without fusion."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        ...

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """The ranks' tensors joined along ``dim``."""
        ...

    def all_to_all(self, rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """Send each rank its rows, and return the rows received; ``counts[i][j]`` go from i to
        j."""
        ...


@dataclass(frozen=True, slots=True)
class ShardPosition:
    """A rank's position, without peers: enough to hold and load weights, not to run a model.

    With size 1 the model also runs.
    """

    rank: int = 0
    size: int = 1
    sum_norm: SumAndNorm | None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the tensor: a single rank has nothing to add."""
        self._refuse()
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Return the tensor: a single rank has nothing to join."""
        self._refuse()
        return tensor

    def all_to_all(self, rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """Return the rows: a single rank has no peers."""
        self._refuse()
        return rows

    def _refuse(self) -> None:
        if self.size != 1:
            raise RuntimeError(
                f"a model built for shard {self.rank} of {self.size} has no peers to run with"
            )


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The ranks that share a layer's experts, divided into parts.

    The ranks of a part shard its experts.
    """

    num_parts: int = 1
    ranks: TensorGroup | None = None
    """The group over all data-parallel ranks; None for one tensor group."""


ONE_PART = ExpertRanks()
"""One tensor group, whose ranks shard every expert."""


def split(name: str, value: int, size: int) -> int:
    """``value / size``, which the configuration's checks guarantee to be whole."""
    assert value % size == 0, f"{name} {value} is not divisible by {size}"
    return value // size


# Shapes: T tokens of the step, D hidden size, S parts of a product.


@dataclass(frozen=True, slots=True)
class PendingSum:
    """A residual's addend [T, D] before the all-reduce, which a norm may do; see `can_wait`."""

    addend: Tensor
    """This rank's part: [T, D], or float32 parts [S, T, D] of it."""

    tp: TensorGroup

    def add_and_normalise(self, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Add the sum to ``residual`` in place; return the RMS-normalised result.
        Collective."""
        assert self.tp.sum_norm is not None, "nothing sums together with a norm here"
        return self.tp.sum_norm(self.addend, residual_TD, weight_D, eps)

    def total(self, residual_TD: Tensor) -> Tensor:
        """The sum [T, D], in the dtype of ``residual``, which is unchanged. Collective."""
        whole_TD = self.addend if self.addend.dim() == 2 else self.addend.sum(0)
        return self.tp.all_reduce(whole_TD.to(residual_TD.dtype))


Addend = Tensor | PendingSum | None
"""A layer's output that is not added to the residual: a tensor [T, D], its float32 parts
[S, T, D], or a sum whose all-reduce is pending. None if it has been added."""


def can_wait(tp: TensorGroup, residual_TD: Tensor | None) -> bool:
    """Whether all-reduces over ``tp`` can be left to the norm that adds them to
    ``residual``."""
    if tp.size == 1 or residual_TD is None or tp.sum_norm is None:
        return False
    return tp.sum_norm.takes(residual_TD)
