"""Other libraries' kernels on a case's inputs: compared with ours, then timed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LIBRARIES = ("flashinfer",)
"""Optional libraries, by the names of their packages; torch is not one of them."""

_MAX_DIFFERENCE = 0.05
"""Largest deviation of a head's output, relative to its norm: rounding to 16 bits makes less
than 0.01.
"""


@dataclass(frozen=True, slots=True)
class LibraryKernel:
    """A library's kernel for a case."""

    library: str
    backend: str
    """The library's name of the kernel."""

    run: Callable[[], object]
    """One launch; takes the case's inputs in the case's order."""


Differences = dict[LibraryKernel, float]


def installed() -> list[str]:
    """The kernels of the libraries that can be imported here."""
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is not None]


def differing(run: Callable[[], object], kernels: tuple[LibraryKernel, ...]) -> Differences:
    """The kernels whose first outputs differ from the case's, and by how much.

    A kernel with another result is not comparable. The case must not have been launched before.
    """
    if not kernels:
        return {}
    with torch.inference_mode():
        ours = run()
        shares = {kernel: _difference(ours, kernel.run()) for kernel in kernels}
    # NaN is no agreement either.
    return {kernel: share for kernel, share in shares.items() if not share <= _MAX_DIFFERENCE}


def fields(times_s: dict[LibraryKernel, float]) -> dict[str, Any]:
    """The fields of a result line: each library's fastest kernel, and the microseconds of
    all.
    """
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
    """The largest deviation over all heads and tokens."""
    assert isinstance(ours, Tensor) and isinstance(theirs, Tensor)
    ours, theirs = ours.float(), theirs.float().view_as(ours)
    return float(((theirs - ours).norm(dim=-1) / ours.norm(dim=-1)).max())
