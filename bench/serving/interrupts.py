"""Ctrl-C while a load is measured, after which what came until then is told."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def at_first_interrupt(stop: Callable[[], object]) -> Iterator[None]:
    """Call ``stop`` at a Ctrl-C; another one has the effect that it has elsewhere.

    Of the main thread alone. Where the signal is ignored, as behind nohup, it stays so.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return

    def call_stop(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    signal.signal(signal.SIGINT, call_stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
