"""Slots for long work, given out by the size of the work."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_BYTES_PER_S = 10e6
"""What a waiting byte counts: work of so many bytes more begins a second later."""


class SizeOrderedSlots:
    """A number of slots that short work gets before long work.

    Work is ordered by its arrival plus a time in proportion to its size: short work overtakes
    long work, and long work is overtaken for a bounded time only.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def slot(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold a slot for work of so many bytes; the wait for the slot may be cancelled."""
        await self._acquire(num_bytes)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, num_bytes: int) -> None:
        if self._num_free > 0:
            self._num_free -= 1
            return
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()
        due = loop.time() + num_bytes / _BYTES_PER_S
        heapq.heappush(self._waiting, (due, next(self._order), granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            _, _, granted = heapq.heappop(self._waiting)
            if not granted.done():
                granted.set_result(None)
                return
        self._num_free += 1
