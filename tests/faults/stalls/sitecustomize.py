"""Lets a test hold up the event loop of a front end, which runs no code of a test otherwise.

On PYTHONPATH of a server under test. SIGUSR2 makes a front end do what the file named by
TRIMARAN_TEST_STALL says: ``python SECONDS`` computes, ``c SECONDS`` computes in one call of C
code that keeps the interpreter, ``sleep SECONDS`` waits.
"""

from __future__ import annotations

import os
import signal
import sys
import time


def stalls_in_python(seconds: float) -> None:
    """Compute in Python, so that other threads run too."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def stalls_in_c(seconds: float) -> None:
    """Compute in one call of C code, which holds the interpreter lock."""
    began = time.monotonic()
    sum(range(10**6))
    sum(range(int(10**6 * seconds / (time.monotonic() - began))))


def stalls_in_sleep(seconds: float) -> None:
    """Wait, and use no processor time."""
    time.sleep(seconds)


def _stall(*_: object) -> None:
    with open(os.environ["TRIMARAN_TEST_STALL"], encoding="ascii") as order:
        how, seconds = order.read().split()
    ways = {"python": stalls_in_python, "c": stalls_in_c, "sleep": stalls_in_sleep}
    ways[how](float(seconds))


if "TRIMARAN_TEST_STALL" in os.environ and "trimaran-frontend" in " ".join(sys.orig_argv):
    signal.signal(signal.SIGUSR2, _stall)
