"""Long work of the event loop, done in pieces between which everything else runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import TypeAlias, TypeVar
from weakref import WeakKeyDictionary

ResultT = TypeVar("ResultT")

Pieces: TypeAlias = Generator[None, None, ResultT]
"""Work that yields wherever others may run, a millisecond apart at most."""

PIECE_ITEMS = 1 << 10
"""Elements of a tensor that one piece converts."""

PIECE_BYTES = 1 << 20
"""Bytes of strings that one piece converts."""

SLICE_S = 2e-3

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def finish(work: Pieces[ResultT]) -> ResultT:
    """Do the work at once."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: ResultT = end.value
            return result


async def spread(work: Pieces[ResultT]) -> ResultT:
    """Do the work on the event loop: short work at once, long work in slices. A round of the
    loop has one slice at most: of several long works each has its turn.

    Not in a thread: it would hold the interpreter for 5 ms whenever the loop wants it back,
    which is at each event.
    """
    try:
        _do_slice(work)
        turn = _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        while True:
            async with turn:
                await asyncio.sleep(0)
                _do_slice(work)
    except StopIteration as end:
        result: ResultT = end.value
        return result
    finally:
        work.close()


def _do_slice(work: Pieces[ResultT]) -> None:
    """Go on with the work for a moment; StopIteration is its end."""
    due = time.monotonic() + SLICE_S
    next(work)
    while time.monotonic() < due:
        next(work)
