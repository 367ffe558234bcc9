"""Stops of builder commands by signals, with a message and an exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppedError(KeyboardInterrupt):
    """A signal stops the command. Code that has written files sets ``left``."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.left = "Nothing was written."


def run_stoppable(command: str, work: Callable[[], int]) -> int:
    """Do the work; returns its exit code, or that of a process that the signal ended."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in before.items():
        # Signals ignored before, as under nohup, stay ignored.
        if handler != signal.SIG_IGN:
            signal.signal(number, _stop)
    try:
        return work()
    except StoppedError as stopped:
        name = signal.Signals(stopped.number).name
        print(f"trimaran {command}: stopped by {name}. {stopped.left}", file=sys.stderr)
        return 128 + stopped.number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_stops() -> None:
    """Ignore further signals, so that `run_stoppable` can end its work."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is _stop:
            signal.signal(number, signal.SIG_IGN)


def _stop(number: int, frame: FrameType | None) -> None:
    # A second signal must not interrupt the clean-up after the first.
    ignore_stops()
    raise StoppedError(number)
