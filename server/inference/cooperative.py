"""Long work of the event loop, done in pieces between which everything else runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import TypeAlias, TypeVar
from weakref import WeakKeyDictionary

ResultT = TypeVar("ResultT")

Cooperative: TypeAlias = Generator[None, None, ResultT]
"""Work that yields wherever others may run, a millisecond apart at most."""

CHUNK_ITEMS = 1 << 10
"""Elements of a tensor that one piece converts."""

CHUNK_BYTES = 1 << 20
"""Bytes of strings that one piece converts."""

SLICE_S = 2e-3

LONG_SLICES = 100
"""Slices after which work is huge: what it made so far is a few megabytes of text."""

MAX_HUGE = 2
"""Works that go on beyond, so that memory holds as many huge results in the making. More than
one, as a short one of them should not always wait for the longest."""


class _Queues:
    """Who waits on one event loop."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """For the slice of a round."""

        self.huge = asyncio.Semaphore(MAX_HUGE)
        """For going on with huge work: first come, first served."""


_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queues] = WeakKeyDictionary()


def run_at_once(work: Cooperative[ResultT]) -> ResultT:
    """Do the work at once."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: ResultT = end.value
            return result


async def run_cooperatively(work: Cooperative[ResultT]) -> ResultT:
    """Do the work on the event loop: short work at once, long work in slices. A round of the
    loop has one slice at most: of several long works each has its turn. Huge work waits where
    `MAX_HUGE` others are under way; in turns, all of them would end, and be held, at once.

    Not in a thread: it would hold the interpreter for 5 ms whenever the loop wants it back,
    which is at each event.
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


def _do_slice(work: Cooperative[ResultT]) -> None:
    """Go on with the work for a moment; StopIteration is its end."""
    due = time.monotonic() + SLICE_S
    next(work)
    while time.monotonic() < due:
        next(work)
