"""Names that one task at a time may work on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager


class ExclusiveNames:
    """Locks by name, taken all at once, so that two tasks never wait for each other."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._released = asyncio.Event()

    def are_free(self, names: Iterable[str]) -> bool:
        """Whether nobody works on any of these."""
        return self._held.isdisjoint(names)

    @asynccontextmanager
    async def hold(self, names: Iterable[str]) -> AsyncIterator[None]:
        """Wait until nobody works on any of these, and keep others off them."""
        wanted = set(names)
        while not self.are_free(wanted):
            self._released.clear()
            await self._released.wait()
        self._held |= wanted
        try:
            yield
        finally:
            self._held -= wanted
            self._released.set()
