"""A thread that ends the job when the main thread is stuck for too long."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

logger = logging.getLogger(__name__)

_LONGEST_PERIOD_S = 1.0


class Watchdog:
    """Watches one activity of the main thread at a time.

    `watch` and `pause` only store two values, so they belong around every step. The
    thread looks about four times per hang timeout, at most once a second: a hang is
    noticed up to a quarter late.
    """

    def __init__(self, hang_timeout_s: float, on_hang: Callable[[], None]) -> None:
        self.hang_timeout_s = hang_timeout_s
        self._on_hang = on_hang
        self._deadline = float("inf")
        self._what: Callable[[], str] = str
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def watch(self, what: Callable[[], str], timeout_s: float | None = None) -> None:
        """An activity begins; ``what()`` describes it if it hangs."""
        limit = self.hang_timeout_s if timeout_s is None else timeout_s
        self._what = what
        self._deadline = time.monotonic() + limit

    def pause(self) -> None:
        """Nothing is going on that could hang."""
        self._deadline = float("inf")

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        period_s = min(self.hang_timeout_s / 4, _LONGEST_PERIOD_S)
        while not self._stopped.wait(period_s):
            late_s = time.monotonic() - self._deadline
            if late_s > 0:
                self._bark(late_s)
                return

    def _bark(self, late_s: float) -> None:
        logger.error(
            "%s did not end within its time limit (%.1f s over): the job ends. If it needs "
            "that long, raise --hang-timeout. Stacks of the main thread and of all follow.",
            self._what(),
            late_s,
        )
        try:
            # Of more than a hundred threads the oldest are left out, and this is the first.
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            if frame is not None:
                traceback.print_stack(frame, file=sys.stderr)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        except (OSError, ValueError):
            logger.exception("the stacks could not be written")
        self._on_hang()
