"""A process that no starter of ranks made: what its MPI need not have."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_STARTERS = ("PMIX_NAMESPACE", "PMI_RANK")
_TRANSPORTS = "OMPI_MCA_btl"
_SEGMENTS = "sm,vader"


@contextlib.contextmanager
def no_segment() -> Iterator[None]:
    """Initialise MPI within: Open MPI makes no shared-memory segment for a rank alone.

    No other process can attach to it, spawned ones included, and it is never deleted: each
    such process would leave a file in /dev/shm. What the operator chose stays.
    """
    given = os.environ.get(_TRANSPORTS)
    if any(name in os.environ for name in _STARTERS) or not (given or "^").startswith("^"):
        yield
        return
    os.environ[_TRANSPORTS] = f"{given},{_SEGMENTS}" if given else f"^{_SEGMENTS}"
    try:
        yield
    finally:
        # Jobs that this process starts have several ranks.
        if given is None:
            del os.environ[_TRANSPORTS]
        else:
            os.environ[_TRANSPORTS] = given
