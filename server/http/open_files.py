"""The descriptors of a front end: which of them clients may have."""

from __future__ import annotations

import logging
import resource
import time

logger = logging.getLogger(__name__)

_MAX_KEPT = 256
_NOTICE_INTERVAL_S = 60.0


class OpenFiles:
    """Keeps some descriptors for engines that dial in, the metrics port and files.

    Where none is left, the system's queue of new connections is emptied by closing them,
    those of engines and operators too, and no line says so. Each look is O(1): a new
    descriptor has the lowest free number, so a high one means that all below are in use.
    """

    def __init__(self) -> None:
        self._limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._kept = min(self._limit // 8, _MAX_KEPT)
        self._noticed_at: float | None = None

    def refusal_of(self, descriptor: int) -> str | None:
        """Why a client's new connection cannot stay, or None; logged once a minute."""
        if self._limit == resource.RLIM_INFINITY or descriptor < self._limit - self._kept:
            return None
        now = time.monotonic()
        if self._noticed_at is None or now - self._noticed_at >= _NOTICE_INTERVAL_S:
            self._noticed_at = now
            logger.warning(
                "New HTTP connections are refused until others end: %d files and connections "
                "are open, and the rest of the %d that a process may have is kept for engines "
                "and metrics. Raise the limit (ulimit -n, systemd's LimitNOFILE), or start "
                "more front ends (--frontend-processes).",
                descriptor, self._limit,
            )  # fmt: skip
        return "the server has too many open connections"
