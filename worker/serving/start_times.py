"""How long each stage of a rank's start took, for the log."""

from __future__ import annotations

import time

import psutil


class StartTimes:
    """Stages in their order, each from the end of the one before; the first from the start
    of the process, so that the interpreter's own start counts."""

    def __init__(self) -> None:
        self._last = time.monotonic() - (time.time() - psutil.Process().create_time())
        self._begin = self._last
        self._stages: list[tuple[str, float]] = []

    def end(self, stage: str) -> None:
        """The stage is over."""
        now = time.monotonic()
        self._stages.append((stage, now - self._last))
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self._stages)
        return f"{self._last - self._begin:.1f} s ({parts})"
