"""Waits whose failures name the missing event and the log so far."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

POLL_S = 0.02


class Logging(Protocol):
    """A process that a test has started."""

    process: subprocess.Popen[bytes]
    log_path: Path

    def log(self) -> str:
        """The output of the process and its children so far."""


started: list[Logging] = []
"""All processes that still run or ended during the current test; a failure shows their logs."""


def wait_until(
    is_done: Callable[[], bool],
    what: str,
    timeout_s: float = 60.0,
    *,
    ended: Callable[[], str] = str,
    told: Callable[[], str] = str,
) -> None:
    """Return once ``is_done``.

    ``ended`` returns the end of the awaited process, and None while the process runs; ``told``
    is called only at a failure.

    Raises:
        AssertionError: the time is over, or the awaited process has ended.
    """
    deadline = time.monotonic() + timeout_s
    while not is_done():
        # The event may have been the last action of the process.
        if (end := ended()) and not is_done():
            raise AssertionError(f"{what}: {end} before\n{told()}")
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s\n{told()}")
        time.sleep(POLL_S)
