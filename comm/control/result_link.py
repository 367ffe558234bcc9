"""Step results from other ranks to rank 0: one message a step and writer, in order."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from trimaran.comm.control.host_connections import connect_to_rank_0
from trimaran.comm.errors import PeerLostError
from trimaran.comm.mpi import World
from trimaran.comm.time_limit import TimeLimit
from trimaran.comm.transport.shared_memory import SharedSegment
from trimaran.comm.transport.shm_ring import SLOT_BYTES, RingReader, RingWriter, ShmRing

_LENGTH = struct.Struct("<Q")
_LONGEST_SLEEP_S = 1.0
_SMALL_BYTES = 16 << 10
"""A size that fits a socket's buffer many times."""


class _Sink(Protocol):
    """The transport end that takes encoded messages."""

    def has_room(self, num_bytes: int) -> bool:
        """Whether `write` of so many bytes would return at once."""
        ...

    def write(self, payload: bytes, timeout_s: float) -> None:
        """Append one message; raises `PeerLostError` if rank 0 reads no message in time."""
        ...

    def close(self) -> None:
        """Free what this end holds."""
        ...


class _Source(Protocol):
    """The transport end that yields encoded messages."""

    transport: str

    def read(self, timeout_s: float) -> bytes | None:
        """The next message; None if none begins in time."""
        ...

    def has_message(self) -> bool:
        """Whether a message has begun to arrive."""
        ...

    def close(self) -> None:
        """Free what this end holds."""
        ...


class ResultWriter:
    """The end of a rank that sends results.

    Sending never delays a step: a thread sends results that are still being copied from
    the device, or for which the transport has no room. A rank that waited for rank 0 could
    deadlock, since rank 0 may be waiting for that rank.
    """

    def __init__(self, sink: _Sink, timeout_s: float) -> None:
        self._sink = sink
        self.timeout_s = timeout_s
        self.on_failure: Callable[[BaseException], None] | None = None
        """Called with an error of the thread; without it the next `post` raises the error."""
        self._queue: SimpleQueue[Callable[[], bytes] | None] = SimpleQueue()
        self._num_queued = 0
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def post(self, encode: Callable[[], bytes], *, is_ready: bool) -> None:
        """Send the result of ``encode``, which returns at once if it ``is_ready``."""
        if self._error is not None:
            raise self._error
        if is_ready and not self._num_queued:
            payload = encode()
            if self._sink.has_room(len(payload)):
                self._sink.write(payload, self.timeout_s)
                return
            self._enqueue(lambda: payload)
            return
        self._enqueue(encode)

    def close(self) -> None:
        """Send the queued results, then free what this end holds."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(self.timeout_s)
        self._sink.close()

    def _enqueue(self, encode: Callable[[], bytes]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="results", daemon=True)
            self._thread.start()
        with self._lock:
            self._num_queued += 1
        self._queue.put(encode)

    def _run(self) -> None:
        while (encode := self._queue.get()) is not None:
            try:
                self._sink.write(encode(), self.timeout_s)
            except BaseException as error:
                # After any error rank 0 would wait for this result until its timeout.
                self._error = error
                if self.on_failure is not None:
                    self.on_failure(error)
                return
            with self._lock:
                self._num_queued -= 1


class ResultReader:
    """Rank 0's end of one writer."""

    def __init__(self, source: _Source, rank: int, timeout_s: float) -> None:
        self._read = source.read
        self.has_message = source.has_message
        self.close = source.close
        self.transport = source.transport
        self._rank = rank
        self.timeout_s = timeout_s

    def read(self) -> bytes:
        """The next message.

        Raises:
            PeerLostError: no message arrived within ``timeout_s``.
        """
        payload = self._read(self.timeout_s)
        if payload is None:
            raise PeerLostError(
                f"rank {self._rank} told no result of a step for {self.timeout_s:.3g} s"
            )
        return payload


# ---- within a host ------------------------------------------------------------------------


class _RingSink:
    """A ring in shared memory with one reader."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring

    def has_room(self, num_bytes: int) -> bool:
        """Whether the ring has that many slots free."""
        return self._ring.num_free >= max(1, -(-num_bytes // SLOT_BYTES))

    def write(self, payload: bytes, timeout_s: float) -> None:
        """Append one message."""
        self._ring.write(payload, timeout_s)

    def close(self) -> None:
        """The kernel frees the memory with the last process that maps it."""


class _RingSource(RingReader):
    """Rank 0's end of a `_RingSink`."""

    transport = "shm_ring"

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """The next message; None if none begins in time."""
        return super().read(timeout_s)

    def close(self) -> None:
        """The kernel frees the memory with the last process that maps it."""


# ---- between hosts ----------------------------------------------------------------------


def _within(limit: TimeLimit, sock: socket.socket, call: Callable[[], int]) -> int:
    """The result of a call of a socket; raises TimeoutError once the limit has passed."""
    while True:
        sock.settimeout(limit.sleep_s(_LONGEST_SLEEP_S))
        try:
            return call()
        except TimeoutError:
            if limit.has_passed():
                raise


class _SocketSink:
    """A TCP connection: MPI is called by the main thread only."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def has_room(self, num_bytes: int) -> bool:
        """Whether the message is small: few are in flight, so a small message fits."""
        return num_bytes <= _SMALL_BYTES

    def write(self, payload: bytes, timeout_s: float) -> None:
        """Send one message."""
        limit = TimeLimit(timeout_s)
        view = memoryview(_LENGTH.pack(len(payload)) + payload)
        try:
            while view:
                view = view[_within(limit, self._sock, partial(self._sock.send, view)) :]
        except OSError as error:
            raise PeerLostError(f"rank 0 took no result of a step: {error}") from error

    def close(self) -> None:
        """End the connection."""
        self._sock.close()


class _SocketSource:
    """Rank 0's end of a `_SocketSink`."""

    transport = "tcp"

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self._sock = sock
        self._rank = rank

    def has_message(self) -> bool:
        """Whether there is a message to read, or the connection was closed."""
        return bool(select.select([self._sock], [], [], 0)[0])

    def read(self, timeout_s: float) -> bytes | None:
        """The next message; None without a complete message in time."""
        limit = TimeLimit(timeout_s)
        try:
            (length,) = _LENGTH.unpack(self._take(_LENGTH.size, limit))
            return bytes(self._take(length, limit))
        except TimeoutError:
            return None
        except OSError as error:
            raise PeerLostError(f"the line of rank {self._rank} broke: {error}") from error

    def _take(self, count: int, limit: TimeLimit) -> bytearray:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            received = _within(limit, self._sock, partial(self._sock.recv_into, view[at:]))
            if not received:
                raise PeerLostError(
                    f"rank {self._rank} is gone: its line of results was closed"
                )
            at += received
        return data

    def close(self) -> None:
        """End the connection."""
        self._sock.close()


# ---- connecting -------------------------------------------------------------------------


def connect_results(
    world: World, writers: Sequence[int], timeout_s: float
) -> tuple[ResultWriter | None, dict[int, ResultReader]]:
    """The end of a rank in ``writers``; on rank 0 the other ends, by rank.

    Collective over ``world``; ``writers`` excludes rank 0. A writer on rank 0's host gets a
    ring in shared memory, a writer on another host a TCP connection.
    """
    here = set(world.ranks_beside(0))
    local = [rank for rank in writers if rank in here]
    remote = [rank for rank in writers if rank not in here]
    writer, readers = _connect_rings(world, local, timeout_s)
    if remote:
        own, socks = connect_to_rank_0(world, remote)
        if own is not None:
            writer = ResultWriter(_SocketSink(own), timeout_s)
        for rank, sock in socks.items():
            readers[rank] = ResultReader(_SocketSource(sock, rank), rank, timeout_s)
    return writer, readers


def _connect_rings(
    world: World, ranks: Sequence[int], timeout_s: float
) -> tuple[ResultWriter | None, dict[int, ResultReader]]:
    own: SharedSegment | None = None
    writer: ResultWriter | None = None
    readers: dict[int, ResultReader] = {}
    if world.rank in ranks:
        own = SharedSegment.create(ShmRing.segment_bytes(1))
        writer = ResultWriter(_RingSink(RingWriter(own, 1)), timeout_s)
    handles = world.comm.gather(None if own is None else own.handle) or []
    for rank in ranks if world.rank == 0 else ():
        segment = SharedSegment.attach(handles[rank])
        readers[rank] = ResultReader(_RingSource(segment, 1, 0), rank, timeout_s)
        segment.close_descriptor()
    world.comm.Barrier()
    if own is not None:
        own.close_descriptor()
    return writer, readers
