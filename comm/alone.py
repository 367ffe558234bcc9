"""A process that no starter of ranks made: what its MPI need not have."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_STARTERS = ("PMIX_NAMESPACE", "PMI_RANK")
_TRANSPORTS = "OMPI_MCA_btl"
_SEGMENTS = "sm,vader"
_SLEEPER = "ofi"
"""The one-sided transport over libfabric sleeps for a second in every start (Open MPI 5.0)."""


@contextlib.contextmanager
def no_segment() -> Iterator[None]:
    """Initialise MPI within: Open MPI makes no shared-memory segment for a rank alone.

    No other process can attach to it, spawned ones included, and it is never deleted: each
    such process would leave a file in /dev/shm. Nor is there a transport that only costs
    time. What the operator chose stays.
    """
    given = os.environ.get(_TRANSPORTS)
    if any(name in os.environ for name in _STARTERS) or not (given or "^").startswith("^"):
        yield
        return
    os.environ[_TRANSPORTS] = f"{given},{_SEGMENTS}" if given else f"^{_SEGMENTS},{_SLEEPER}"
    try:
        yield
    finally:
        # Jobs that this process starts have several ranks.
        if given is None:
            del os.environ[_TRANSPORTS]
        else:
            os.environ[_TRANSPORTS] = given
