"""Waits that say, when they fail, what did not happen and what the log holds by then."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

POLL_S = 0.02


class Logging(Protocol):
    """Something that a test has started."""

    process: subprocess.Popen[bytes]
    log_path: Path

    def log(self) -> str:
        """What it and its children have written so far."""


started: list[Logging] = []
"""All that still runs, or has ended in the test that runs: a failure is told with its logs."""


def wait_until(
    is_done: Callable[[], bool],
    what: str,
    timeout_s: float = 60.0,
    *,
    ended: Callable[[], str] = str,
    told: Callable[[], str] = str,
) -> None:
    """Return once ``is_done``.

    ``ended`` says how what is waited for came to its end, and nothing while it lives;
    ``told`` is asked at a failure and not before.

    Raises:
        AssertionError: the time is over, or what is waited for has ended.
    """
    deadline = time.monotonic() + timeout_s
    while not is_done():
        # Its last deed may have been what is waited for.
        if (end := ended()) and not is_done():
            raise AssertionError(f"{what}: {end} before\n{told()}")
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s\n{told()}")
        time.sleep(POLL_S)
