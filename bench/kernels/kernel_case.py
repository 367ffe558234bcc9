"""One timed call of a kernel, and the least bytes and operations of the machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trimaran.bench.kernels.library_kernels import LibraryKernel

Inputs = TypeVar("Inputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """A kernel on inputs of one shape, launched without waiting for the device."""

    name: str
    shape: str
    dtype: str
    run: Callable[[], object]
    """One launch; each call uses other inputs, so that none is in a cache."""

    num_bytes: int
    """Every input read once and every output written once."""

    flops: int = 0
    peer: Callable[[], object] | None = None
    """The same operator in torch, if torch has it."""

    libraries: tuple[LibraryKernel, ...] = ()
    """The same operator in other libraries that are installed, on the same inputs."""

    def limit_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The least time by the machine's two ceilings."""
        return max(self.num_bytes / bytes_per_s, self.flops / flops_per_s)


def in_turn(
    function: Callable[[Inputs], object], sets: Sequence[Inputs]
) -> Callable[[], object]:
    """A call without arguments that cycles through the sets of inputs."""
    turns = itertools.cycle(sets)
    return lambda: function(next(turns))
