"""The tensor-parallel group as layers see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class TensorGroup(Protocol):
    """The ranks that share each layer; collective calls are made by all in one order."""

    @property
    def rank(self) -> int:
        """This rank within the group."""
        ...

    @property
    def size(self) -> int:
        """Ranks of the group; with 1 every call is a no-op."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        ...

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """The ranks' tensors joined along ``dim``."""
        ...


@dataclass(frozen=True, slots=True)
class ShardPosition:
    """A rank's place without peers: enough to hold and load its weights, not to run them.

    With size 1 it also runs.
    """

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Nothing to add for a single rank."""
        self._refuse()
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Nothing to join for a single rank."""
        self._refuse()
        return tensor

    def _refuse(self) -> None:
        if self.size != 1:
            raise RuntimeError(
                f"a model built for shard {self.rank} of {self.size} has no peers to run with"
            )


def split(name: str, value: int, size: int) -> int:
    """``value / size``, which the configuration's checks guarantee to be whole."""
    assert value % size == 0, f"{name} {value} is not divisible by {size}"
    return value // size
