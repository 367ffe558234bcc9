"""Targets of a load, in a module that its processes can import."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from trimaran.bench.serving.load import Prepared, Record
from trimaran.bench.serving.workload import Item

_START_S = 3.0


class AtOnce:
    """Answers with its tokens at once, one after another."""

    async def connect(self, count: int) -> None:
        """Nothing is to be opened."""

    def prepare(self, item: Item) -> Prepared:
        """Make one request."""

        async def run(record: Record) -> None:
            record.arrivals += [(time.monotonic(), 1) for _ in range(self._num_tokens(item))]

        return run

    async def close(self) -> None:
        """Nothing is open."""

    def _num_tokens(self, item: Item) -> int:
        return item.output_len


class Warm(AtOnce):
    """Answers with one token for each open connection, and ten more for each warm-up request
    before the first counted request."""

    def __init__(self) -> None:
        self._num_before = 0
        self._num_connections = 0

    async def connect(self, count: int) -> None:
        self._num_connections = count

    def _num_tokens(self, item: Item) -> int:
        if not self._num_connections:
            self._num_before += 1
            return 1
        return self._num_connections + 10 * self._num_before


async def prompt_target() -> AtOnce:
    """A target that is there at once."""
    return AtOnce()


async def warm_target() -> Warm:
    """A target whose output length reveals its warm-up."""
    return Warm()


async def late_target() -> AtOnce:
    """A target of a process that takes long to import and connect."""
    await asyncio.sleep(_START_S)
    return AtOnce()


async def killed_target() -> Any:
    """A process that the system ends."""
    os.kill(os.getpid(), signal.SIGKILL)
