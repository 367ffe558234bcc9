"""When the engine's process looks for garbage: while it has nothing else to do."""

from __future__ import annotations

import gc
import time

BUSY_PERIOD_S = 60.0
"""An engine that never rests looks this often: what a step makes holds no cycles, so that
little can have gathered."""

IDLE_PERIOD_S = 1.0


class GarbageCollection:
    """Python's collector, off but for moments that are chosen.

    Left to itself it runs in the middle of steps and looks at every queued request: 5 ms
    with a thousand of them. (What a loaded engine consists of is frozen and never looked at.)
    Use as a context manager: afterwards the collector is as it was.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._was_enabled = False

    def __enter__(self) -> GarbageCollection:
        self._was_enabled = gc.isenabled()
        gc.disable()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._was_enabled:
            gc.enable()

    def after_step(self) -> None:
        """Collect if it has been long."""
        self._collect(BUSY_PERIOD_S)

    def at_rest(self) -> None:
        """There is no work: collect, unless that was done a moment ago."""
        self._collect(IDLE_PERIOD_S)

    def _collect(self, period_s: float) -> None:
        now = time.monotonic()
        if now - self._last >= period_s:
            gc.collect()
            self._last = time.monotonic()
