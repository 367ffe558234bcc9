"""Long work of the event loop that yields to other tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar
from weakref import WeakKeyDictionary

ResultT = TypeVar("ResultT")

Cooperative: TypeAlias = Generator[None, None, ResultT]
"""Work that yields at least once a millisecond."""

CHUNK_ITEMS = 1 << 10
"""Elements of a tensor that are converted between two yields."""

CHUNK_BYTES = 1 << 20
"""Bytes of strings that are converted between two yields."""

SLICE_S = 2e-3

LONG_SLICES = 100
"""Slices after which work counts as huge: its partial result has a few megabytes of text."""

MAX_HUGE = 2
"""Huge works that proceed at the same time, which limits memory for partial results. With more
than one, a shorter work does not always wait for the longest.
"""


class _Queues:
    """The waiters of one event loop."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """Held for one slice, so that each round of the loop runs one slice at most."""

        self.huge = asyncio.Semaphore(MAX_HUGE)
        """Held by huge work; waiters are served first come, first served."""


_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queues] = WeakKeyDictionary()


def run_at_once(work: Cooperative[ResultT]) -> ResultT:
    """Do the whole work without yielding to the event loop."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: ResultT = end.value
            return result


async def run_cooperatively(work: Cooperative[ResultT]) -> ResultT:
    """Do the work on the event loop: short work at once, long work in slices. Each round of the
    loop runs at most one slice, and long works alternate. Huge work waits while `MAX_HUGE`
    others are under way: if all of them alternated, all their results would be in memory at the
    same time.

    A thread would hold the interpreter for 5 ms each time that the loop wants to run, which is
    at each event.
    """
    try:
        _do_slice(work)
        queues = _queues.setdefault(asyncio.get_running_loop(), _Queues())
        for _ in range(LONG_SLICES):
            async with queues.turn:
                await asyncio.sleep(0)
                _do_slice(work)
        async with queues.huge:
            while True:
                async with queues.turn:
                    await asyncio.sleep(0)
                    _do_slice(work)
    except StopIteration as end:
        result: ResultT = end.value
        return result
    finally:
        work.close()


async def in_turn(make: Callable[[], ResultT]) -> ResultT:
    """What a short work makes, in the round of the loop that is its turn among long works."""
    queues = _queues.setdefault(asyncio.get_running_loop(), _Queues())
    async with queues.turn:
        await asyncio.sleep(0)
        return make()


def _do_slice(work: Cooperative[ResultT]) -> None:
    """Proceed for one slice; StopIteration is the end of the work."""
    due = time.monotonic() + SLICE_S
    next(work)
    while time.monotonic() < due:
        next(work)
