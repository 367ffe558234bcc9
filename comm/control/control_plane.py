"""The control plane of a group: broadcasts the step decisions of rank 0 to all other ranks."""

from __future__ import annotations

import time
from enum import IntEnum
from typing import Protocol

from trimaran.comm.control.host_connections import WakeReceiver, WakeSender, connect_wakeups
from trimaran.comm.deadlines import Backoff, wait_for
from trimaran.comm.errors import PeerLostError
from trimaran.comm.mpi import MPI, Comm, World
from trimaran.comm.time_limit import TimeLimit
from trimaran.comm.transport.shared_memory import SharedSegment
from trimaran.comm.transport.shm_ring import RingReader, RingWriter, ShmRing

_TAG = 1


class _Kind(IntEnum):
    """First byte of every message of the control plane."""

    DECISION = 0
    IDLE = 1
    """The engine is idle: followers wait for the next decision without a time limit."""
    ALIVE = 2
    """Work is outstanding but this step has no decision."""
    CLOSE = 3


class ControlPlane(Protocol):
    """One writer, rank 0; every other rank receives each payload once, in order.

    After a decision the next message is due within the hang timeout, unless `mark_idle`
    came last. Calls that wait end with `PeerLostError` when a peer misses its deadline.
    """

    last_decision: bytes
    """The last decision that was sent or received, for the log of a failure; initially
    empty."""

    def broadcast(self, payload: bytes) -> None:
        """Rank 0: send one decision to all."""

    def mark_idle(self) -> None:
        """Rank 0: let followers wait without a time limit."""

    def keep_alive(self) -> None:
        """Rank 0, often while busy: prevent a silence that followers take for a failure."""

    def receive(self) -> bytes | None:
        """Followers: the next decision; None after `close` of rank 0."""

    def close(self) -> None:
        """Rank 0: end every follower's loop. All: free what this end holds."""

    @property
    def transport(self) -> str:
        """How decisions travel, for the log and the metrics."""


class LocalControlPlane:
    """The control plane of a group of one rank, which has no followers."""

    transport = "none"

    def __init__(self) -> None:
        self.last_decision = b""

    def broadcast(self, payload: bytes) -> None:
        """Nothing to send."""
        self.last_decision = payload

    def mark_idle(self) -> None:
        """Nothing to send."""

    def keep_alive(self) -> None:
        """Nothing to send."""

    def receive(self) -> bytes | None:
        """Not called: a group of one rank has no follower.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a group of one rank has no follower")

    def close(self) -> None:
        """Nothing to close."""


class Leader:
    """Rank 0's end: the ring of its own host, and one MPI message to each other host."""

    def __init__(
        self,
        comm: Comm,
        ring: RingWriter | None,
        first_ranks: list[int],
        wake: WakeSender | None,
        timeout_s: float,
    ) -> None:
        self._comm = comm
        self._ring = ring
        self._first_ranks = first_ranks
        self._wake = wake
        self._timeout_s = timeout_s
        self._num_sent = 0
        self._is_idle = True
        self._is_closed = False
        self.last_decision = b""
        self._last_sent = 0.0

    @property
    def transport(self) -> str:
        """How decisions travel, for the log and the metrics."""
        return _transport(self._ring is not None, bool(self._first_ranks))

    def broadcast(self, payload: bytes) -> None:
        """Send one decision to all ranks; returns before the ranks have received the
        decision."""
        self.last_decision = payload
        self._send(_Kind.DECISION, payload)

    def mark_idle(self) -> None:
        """Let followers wait without a time limit."""
        self._send(_Kind.IDLE)

    def keep_alive(self) -> None:
        """Send a sign of life if the last message is older than a quarter of the time limit."""
        if time.monotonic() - self._last_sent > self._timeout_s / 4:
            self._send(_Kind.ALIVE)

    def receive(self) -> bytes | None:
        """Rank 0 sends only.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("rank 0 does not receive decisions")

    def close(self) -> None:
        """End every follower's loop."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._send(_Kind.CLOSE)
        finally:
            if self._wake is not None:
                self._wake.close()

    def _send(self, kind: _Kind, payload: bytes = b"") -> None:
        message = bytes((kind,)) + payload
        self._last_sent = time.monotonic()
        self._num_sent += 1
        # Other hosts first: their transport is slower.
        requests = [
            self._comm.Isend([message, MPI.BYTE], rank, _TAG) for rank in self._first_ranks
        ]
        if self._is_idle and self._wake is not None:
            self._wake.wake(self._num_sent)
        self._is_idle = kind == _Kind.IDLE
        if self._ring is not None:
            self._ring.write(message, self._timeout_s)
        # A large message moves only while its sender is inside MPI. The transfer is completed
        # here, because the following step may not call MPI.
        if requests and not wait_for(lambda: MPI.Request.Testall(requests), self._timeout_s):
            raise PeerLostError(
                f"the first rank of another host (one of {self._first_ranks}) took no "
                f"decision for {self._timeout_s:g} s"
            )


class Follower:
    """The end of another rank: reads its host's ring. The first rank of a host also writes
    the ring."""

    transport = ""

    def __init__(self, source: RingReader | MpiSource, timeout_s: float) -> None:
        self._source = source
        self._timeout_s = timeout_s
        self._is_idle = True
        self.last_decision = b""

    def broadcast(self, payload: bytes) -> None:
        """Followers receive only.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("only rank 0 broadcasts decisions")

    mark_idle = keep_alive = lambda self: None

    def close(self) -> None:
        """Free what this end holds."""
        if isinstance(self._source, MpiSource):
            self._source.close()

    def receive(self) -> bytes | None:
        """The next decision; None after `close` of rank 0.

        Raises:
            PeerLostError: work is outstanding and rank 0 was silent for too long.
        """
        while True:
            message = self._source.read(None if self._is_idle else self._timeout_s)
            if message is None:
                raise PeerLostError(
                    f"rank 0 sent no decision for {self._timeout_s:g} s although work is "
                    "outstanding"
                )
            kind = message[0]
            self._is_idle = kind == _Kind.IDLE
            if kind == _Kind.DECISION:
                self.last_decision = message[1:]
                return self.last_decision
            if kind == _Kind.CLOSE:
                return None


class MpiSource:
    """Reads rank 0's messages over MPI and passes them on to the ring of this host."""

    def __init__(
        self, comm: Comm, ring: RingWriter | None, wake: WakeReceiver, timeout_s: float
    ) -> None:
        self._comm = comm
        self._ring = ring
        self._wake = wake
        self._timeout_s = timeout_s
        self._num_read = 0

    def close(self) -> None:
        """Close the wake-up connection."""
        self._wake.close()

    def read(self, timeout_s: float | None) -> bytes | None:
        """The next message; None without a message within ``timeout_s``.

        Polls, because a blocking MPI receive would occupy the core. Without a limit the call
        first sleeps until rank 0 wakes this host.
        """
        status = MPI.Status()
        found = self._comm.Improbe(0, _TAG, status)
        if timeout_s is None:
            if found is None:
                self._wake.wait_beyond(self._num_read)
            else:
                self._wake.take_waiting()
        limit = TimeLimit(self._timeout_s if timeout_s is None else timeout_s)
        backoff = Backoff()
        while found is None:
            if limit.has_passed():
                return None
            backoff.pause()
            found = self._comm.Improbe(0, _TAG, status)
        self._num_read += 1
        buffer = bytearray(status.Get_count(MPI.BYTE))
        found.Recv([buffer, MPI.BYTE])
        message = bytes(buffer)
        if self._ring is not None:
            self._ring.write(message, self._timeout_s)
        return message


def _transport(has_ring: bool, has_mpi: bool) -> str:
    names = [name for name, used in (("shm_ring", has_ring), ("mpi", has_mpi)) if used]
    return "+".join(names)


def connect_control(world: World, timeout_s: float) -> ControlPlane:
    """This rank's end of the group's control plane. Collective over ``world``.

    ``timeout_s`` is the longest silence while work is outstanding.
    """
    if world.size == 1:
        return LocalControlPlane()
    comm = world.duplicate()
    beside = world.local_ranks
    ring = _share_ring(world, beside)
    first_ranks = sorted({world.ranks_beside(rank)[0] for rank in range(world.size)} - {0})
    sender, receiver = connect_wakeups(world, first_ranks) if first_ranks else (None, None)
    if world.rank == 0:
        return Leader(comm, ring[0], first_ranks, sender, timeout_s)
    if receiver is not None:
        return Follower(MpiSource(comm, ring[0], receiver, timeout_s), timeout_s)
    assert ring[1] is not None
    return Follower(ring[1], timeout_s)


def _share_ring(
    world: World, beside: tuple[int, ...]
) -> tuple[RingWriter | None, RingReader | None]:
    """This rank's end of its host's ring, which the first rank writes; None for a single
    rank."""
    local = world.subgroup(beside)
    num_readers = local.size - 1
    if num_readers == 0:
        return None, None
    if local.rank == 0:
        segment = SharedSegment.create(ShmRing.segment_bytes(num_readers))
        local.comm.bcast(segment.handle)
    else:
        segment = SharedSegment.attach(local.comm.bcast(None))
    local.comm.Barrier()
    segment.close_descriptor()
    if local.rank == 0:
        return RingWriter(segment, num_readers), None
    return None, RingReader(segment, num_readers, local.rank - 1)
