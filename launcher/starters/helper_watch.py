"""Notices the death of processes that are not our children: a starter's own helpers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path


class HelperWatch:
    """Watches processes through descriptors, so that no other process can be mistaken."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end
        self._fds: list[int] = []

    def watch(self, pids: Iterable[int]) -> None:
        """Call ``on_end`` with name and pid when one of these ends."""
        loop = asyncio.get_running_loop()
        for pid in pids:
            try:
                name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
                fd = os.pidfd_open(pid)
            except OSError:
                continue  # it has ended, or this kernel cannot; the heartbeat remains
            self._fds.append(fd)
            loop.add_reader(fd, self._end, fd, f"{name} (pid {pid})")

    def close(self) -> None:
        """Stop watching."""
        loop = asyncio.get_running_loop()
        for fd in self._fds:
            loop.remove_reader(fd)
            os.close(fd)
        self._fds.clear()

    def _end(self, fd: int, process: str) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        self._on_end(process)
