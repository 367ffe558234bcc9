"""Whether the event loop of this process turns, and the stacks of what holds the loop up."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal
import sys
import threading
import time
import traceback
from itertools import islice

logger = logging.getLogger(__name__)

STALL_S = 2.0
"""An event loop that has not turned for so long is stalled."""

_BEAT_S = 0.25
_POLL_S = 0.5
_MAX_STACKS = 32


def dump_stacks_on_signal() -> None:
    """Have SIGUSR1 write the stacks of all threads to stderr, whatever the process does."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)


class StallWatch:
    """A thread that logs the stacks of a stalled event loop after 2, 4, 8 ... seconds.

    Where one call of C code keeps all Python threads waiting, this one included, the timer of
    faulthandler writes the stacks in its place. The timer fires only then, so that no stack
    is read while the stack changes.
    """

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._beat = time.monotonic()
        self._is_watching = False
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall-watch", daemon=True)

    def start(self) -> None:
        """Watch the running event loop from now on."""
        self._loop_thread = threading.get_ident()
        self._tick()
        self._is_watching = True
        self._thread.start()

    def stop(self) -> None:
        """Watch no more: the loop is about to end."""
        if not self._is_watching:
            return
        self._is_watching = False
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def is_turning(self) -> bool:
        """Whether the loop has turned lately, or is not watched; for any thread."""
        return not self._is_watching or self._late_s < self._stall_s

    @property
    def _late_s(self) -> float:
        return time.monotonic() - self._beat

    def _tick(self) -> None:
        self._beat = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(_BEAT_S, self._tick)

    def _run(self) -> None:
        next_dump_s = self._stall_s
        stalled_s = 0.0
        while not self._stopped.wait(_POLL_S):
            faulthandler.dump_traceback_later(self._stall_s + _POLL_S, file=sys.stderr)
            late_s = self._late_s
            if late_s < self._stall_s:
                if stalled_s:
                    logger.warning("the event loop turns again, after %.1f s", stalled_s)
                next_dump_s, stalled_s = self._stall_s, 0.0
                continue
            stalled_s = late_s
            if late_s >= next_dump_s:
                next_dump_s *= 2
                self._log_stacks(late_s)

    def _log_stacks(self, late_s: float) -> None:
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        # The loop's own first, then as many others as a log line may hold.
        first = self._loop_thread
        others = (ident for ident in frames if ident not in (first, threading.get_ident()))
        parts = [
            f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frames[ident]))}"
            for ident in (first, *islice(others, _MAX_STACKS))
            if ident in frames
        ]
        logger.warning(
            "the event loop has not turned for %.1f s, and requests wait. Stacks of its thread "
            "and of the others:\n%s", late_s, "".join(parts),
        )  # fmt: skip
