"""Notices to all ranks that one of them compiles a kernel, and that it goes on."""

from __future__ import annotations

import time

import numpy as np

from trimaran.comm.mpi import MPI, Comm, World
from trimaran.comm.time_limit import PauseState

_TAG = 0
_GREETING, _BEGIN, _END = 0.0, 1.0, 2.0
_ATTEMPTS, _ATTEMPT_S = 10, 0.002
"""A message that was sent seconds ago may need some calls of MPI to come out."""


class PauseNotices:
    """This rank's end: a begin brings the longest time of a pause, an end brings its time.

    Sending does not wait. MPI keeps the messages until a time limit passes at their receiver.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._peers = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []
        self._began = 0.0
        self._ended_s = 0.0
        self._until: dict[int, float] = {}
        """By rank that pauses: the time at which its pause must have ended."""

    @classmethod
    def connect(cls, world: World) -> PauseNotices | None:
        """None for a single rank. Collective over ``world``.

        Each rank greets each other one, because MPI connects two ranks at their first message,
        and a rank that compiles could not answer.
        """
        if world.size == 1:
            return None
        notices = cls(world.duplicate())
        notices._send(_GREETING, 0.0)
        buffer = np.empty(2)
        for rank in notices._peers:
            notices._comm.Recv(buffer, rank, _TAG)
        for request, _ in notices._sent:
            request.Wait()
        notices._sent.clear()
        return notices

    def begin(self, longest_s: float) -> None:
        """This rank pauses, for ``longest_s`` at most."""
        if not self._began:
            self._began = time.monotonic()
            self._send(_BEGIN, longest_s)

    def end(self) -> None:
        """This rank goes on."""
        if self._began:
            self._send(_END, time.monotonic() - self._began)
            self._began = 0.0

    def state(self) -> PauseState:
        """What the other ranks have told until now. One thread at a time may call this."""
        buffer, status = np.empty(2), MPI.Status()
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_ATTEMPT_S)
            while (found := self._comm.Improbe(MPI.ANY_SOURCE, _TAG, status)) is not None:
                found.Recv(buffer)
                self._take(status.Get_source(), float(buffer[0]), float(buffer[1]))
        now = time.monotonic()
        is_paused = any(until > now for until in self._until.values())
        return PauseState(self._ended_s, is_paused)

    def _take(self, rank: int, kind: float, seconds: float) -> None:
        if kind == _BEGIN:
            self._until[rank] = time.monotonic() + seconds
        elif kind == _END:
            self._until.pop(rank, None)
            self._ended_s += seconds

    def _send(self, kind: float, seconds: float) -> None:
        self._sent = [each for each in self._sent if not each[0].Test()]
        message = np.array((kind, seconds))
        for rank in self._peers:
            self._sent.append((self._comm.Isend(message, rank, _TAG), message))
