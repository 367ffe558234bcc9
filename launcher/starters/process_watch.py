"""Watches processes that are no children of this one: helpers of mpirun, spawned ranks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from trimaran.launcher.starters.process_tree import descendants, incarnations, send

_POLL_S = 0.25
_READ_S = 0.1
"""Time for reading the end of a connected rank from its connection, which has more details."""


class ProcessWatch:
    """Watches processes by pidfd, so that a reused pid is never mistaken."""

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
                continue  # it has ended, or there is no pidfd; the heartbeat remains
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


class RankWatch:
    """Finds the ranks of one group as they start, and watches them.

    Spawned ranks have no starter that reports their death. A rank that dies before MPI_Init
    leaves MPI_Comm_spawn waiting for ever; a rank that dies before it has connected closes no
    connection.

    A daemon that briefly outlives its orchestrator may still start ranks of an earlier
    incarnation: those are killed.
    """

    def __init__(
        self, tag: str, incarnation: int, num_ranks: int, on_end: Callable[[str], None]
    ) -> None:
        """``on_end`` gets a text that names the process."""
        self._tag = tag
        self._incarnation = incarnation
        self._num_ranks = num_ranks
        self._on_end = on_end
        self._seen: set[int] = set()
        self._ends = ProcessWatch(self._on_seen_end)
        self._timers: list[asyncio.TimerHandle] = []
        self._later(_POLL_S, self._look)

    def close(self) -> None:
        """Stop watching."""
        for timer in self._timers:
            timer.cancel()
        self._ends.close()

    def _look(self) -> None:
        tagged_now = incarnations(os.getpid(), self._tag)
        earlier = range(self._incarnation)
        for pid in [pid for pid, number in tagged_now.items() if number in earlier]:
            del tagged_now[pid]
            send(pid, signal.SIGKILL)
        # Processes that a rank starts have its tag too.
        found = tagged_now.keys() - {pid for rank in tagged_now for pid in descendants(rank)}
        gone = self._seen - found
        if gone:
            self._on_end(f"a spawned rank (pid {min(gone)}) died")
            return
        was_complete = len(self._seen) >= self._num_ranks
        self._ends.watch(found - self._seen)
        self._seen |= found
        # One more look after the last one: a process can end before it is watched.
        if not was_complete:
            self._later(_POLL_S, self._look)

    def _on_seen_end(self, process: str) -> None:
        self._later(_READ_S, self._on_end, f"{process} died")

    def _later(self, delay_s: float, action: Callable[..., None], *values: str) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, action, *values))
