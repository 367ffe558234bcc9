"""Targets of a load, in a module that its processes can import."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from trimaran.client.load import Record
from trimaran.client.workload import Item

_START_S = 3.0


class AtOnce:
    """Answers with its tokens at once, one after the other."""

    async def generate(self, item: Item, record: Record) -> None:
        """Run one request."""
        record.arrivals += [(time.monotonic(), 1) for _ in range(item.output_len)]

    async def close(self) -> None:
        """Nothing is open."""


async def prompt_target() -> AtOnce:
    """A target that is there at once."""
    return AtOnce()


async def late_target() -> AtOnce:
    """A target of a process that takes long to import and connect."""
    await asyncio.sleep(_START_S)
    return AtOnce()


async def killed_target() -> Any:
    """A process that the system ends."""
    os.kill(os.getpid(), signal.SIGKILL)
