"""Waiting with a deadline: spin briefly, then sleep longer and longer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SPIN_S = 0.0005
FIRST_SLEEP_S = 0.00005
BUSY_SLEEP_S = 0.001
"""Longest sleep of a waiter that expects something soon."""


class Backoff:
    """The pauses of one polling wait.

    The first `SPIN_S` only yields the core, so that a peer on the same core can run;
    later pauses sleep, growing by half each time up to ``max_sleep_s``.
    """

    def __init__(self, max_sleep_s: float = BUSY_SLEEP_S) -> None:
        self._max_sleep_s = max_sleep_s
        self._spin_until = time.monotonic() + SPIN_S
        self._sleep_s = FIRST_SLEEP_S

    def pause(self) -> None:
        """Give the core away once."""
        if time.monotonic() < self._spin_until:
            os.sched_yield()
            return
        time.sleep(self._sleep_s)
        self._sleep_s = min(self._sleep_s * 1.5, self._max_sleep_s)


def wait_for(
    is_done: Callable[[], bool], timeout_s: float, max_sleep_s: float = BUSY_SLEEP_S
) -> bool:
    """Poll until ``is_done()``; False if that takes longer than ``timeout_s``."""
    if is_done():
        return True
    deadline = time.monotonic() + timeout_s
    backoff = Backoff(max_sleep_s)
    while not is_done():
        if time.monotonic() > deadline:
            return False
        backoff.pause()
    return True
