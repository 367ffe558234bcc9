"""Kernels of other libraries on a case's inputs: held against ours, then timed beside it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LIBRARIES = ("flashinfer",)
"""Optional ones, by the names of their packages; torch is none of them."""

_MOST_DIFFERENCE = 0.05
"""Of a head's output, as a share of its length: rounding to 16 bits makes less than 0.01."""


@dataclass(frozen=True, slots=True)
class LibraryKernel:
    """One of a library's ways to a case's outputs."""

    library: str
    backend: str
    """Which of the library's kernels, in its own words."""

    run: Callable[[], object]
    """One launch; takes the case's inputs in the order in which the case takes them."""


Differences = dict[LibraryKernel, float]


def installed() -> list[str]:
    """Those of the libraries that can be imported here."""
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is not None]


def differing(run: Callable[[], object], kernels: tuple[LibraryKernel, ...]) -> Differences:
    """The kernels whose first outputs are not a case's first, and how far off each is.

    What computes something else is no peer, however fast it is. Nothing of the case may have
    been launched before.
    """
    if not kernels:
        return {}
    with torch.inference_mode():
        ours = run()
        shares = {kernel: _difference(ours, kernel.run()) for kernel in kernels}
    # Not a number is no agreement either.
    return {kernel: share for kernel, share in shares.items() if not share <= _MOST_DIFFERENCE}


def fields(times_s: dict[LibraryKernel, float]) -> dict[str, Any]:
    """A result line's: of each library its fastest kernel, and the microseconds of all."""
    found: dict[str, Any] = {}
    for library in dict.fromkeys(kernel.library for kernel in times_s):
        backends_us = {
            kernel.backend: round(1e6 * seconds, 2)
            for kernel, seconds in times_s.items()
            if kernel.library == library
        }
        fastest = min(backends_us, key=backends_us.__getitem__)
        found[f"{library}_us"] = backends_us[fastest]
        found[f"{library}_backend"] = fastest
        found[f"{library}_backends"] = backends_us
        found[f"{library}_version"] = importlib.import_module(library).__version__
    return found


def _difference(ours: object, theirs: object) -> float:
    """The largest of any head's of any token."""
    assert isinstance(ours, Tensor) and isinstance(theirs, Tensor)
    ours, theirs = ours.float(), theirs.float().view_as(ours)
    return float(((theirs - ours).norm(dim=-1) / ours.norm(dim=-1)).max())
