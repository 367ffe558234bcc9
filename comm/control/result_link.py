"""What other ranks have to tell rank 0 of each step: one message a step, in order."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from trimaran.comm.control.host_connections import connect_to_rank_0
from trimaran.comm.errors import PeerLostError
from trimaran.comm.mpi import World
from trimaran.comm.transport.shared_memory import SharedSegment
from trimaran.comm.transport.shm_ring import SLOT_BYTES, RingReader, RingWriter, ShmRing

_LENGTH = struct.Struct("<Q")
_SMALL_BYTES = 16 << 10
"""Fits a socket's buffer many times."""


class _Sink(Protocol):
    """Where encoded messages go."""

    def has_room(self, num_bytes: int) -> bool:
        """Whether `write` of so many bytes would return at once."""
        ...

    def write(self, payload: bytes, timeout_s: float) -> None:
        """Append one message; raises `PeerLostError` if rank 0 takes none in time."""
        ...

    def close(self) -> None:
        """Free what this end holds."""
        ...


class _Source(Protocol):
    """Where they come from."""

    transport: str

    def read(self, timeout_s: float) -> bytes | None:
        """The next message; None if none begins in time."""
        ...

    def has_message(self) -> bool:
        """Whether a message has begun to come."""
        ...

    def close(self) -> None:
        """Free what this end holds."""
        ...


class ResultWriter:
    """The end of a rank that tells results.

    It never makes a step wait: a result that is still on its way from the device, or that
    rank 0 has no room for yet, is left to a thread. So no rank that runs steps waits for
    rank 0, which may be waiting for that very rank.
    """

    def __init__(self, sink: _Sink, timeout_s: float) -> None:
        self._sink = sink
        self.timeout_s = timeout_s
        self.on_failure: Callable[[BaseException], None] | None = None
        """Told, on the thread, of what went wrong there; else the next `post` raises it."""
        self._queue: SimpleQueue[Callable[[], bytes] | None] = SimpleQueue()
        self._num_queued = 0
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def post(self, encode: Callable[[], bytes], *, is_ready: bool) -> None:
        """Tell what ``encode`` returns, which waits for nothing if it ``is_ready``."""
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
        """Tell what is left to tell, then free what this end holds."""
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
                # Whatever it is, rank 0 would wait for this result in vain.
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
            PeerLostError: none came within ``timeout_s``.
        """
        payload = self._read(self.timeout_s)
        if payload is None:
            raise PeerLostError(
                f"rank {self._rank} told no result of a step for {self.timeout_s:.3g} s"
            )
        return payload


# ---- in one host ------------------------------------------------------------------------


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
        """The memory goes with the last process that maps it."""


class _RingSource(RingReader):
    """Rank 0's end of such a ring."""

    transport = "shm_ring"

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """The next message; None if none begins in time."""
        return super().read(timeout_s)

    def close(self) -> None:
        """The memory goes with the last process that maps it."""


# ---- between hosts ----------------------------------------------------------------------


class _SocketSink:
    """A TCP connection; not MPI, as one thread of a process calls that."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def has_room(self, num_bytes: int) -> bool:
        """Whether the message is small: so few are under way that such a one fits."""
        return num_bytes <= _SMALL_BYTES

    def write(self, payload: bytes, timeout_s: float) -> None:
        """Send one message."""
        self._sock.settimeout(timeout_s)
        try:
            self._sock.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise PeerLostError(f"rank 0 took no result of a step: {error}") from error

    def close(self) -> None:
        """End the connection."""
        self._sock.close()


class _SocketSource:
    """Rank 0's end of a connection."""

    transport = "tcp"

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self._sock = sock
        self._rank = rank

    def has_message(self) -> bool:
        """Whether there is anything to read, be it that the line was closed."""
        return bool(select.select([self._sock], [], [], 0)[0])

    def read(self, timeout_s: float) -> bytes | None:
        """The next message; None if it does not come in time."""
        self._sock.settimeout(timeout_s)
        try:
            (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
            return bytes(self._take(length))
        except TimeoutError:
            return None
        except OSError as error:
            raise PeerLostError(f"the line of rank {self._rank} broke: {error}") from error

    def _take(self, count: int) -> bytearray:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            received = self._sock.recv_into(view[at:])
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
    """This rank's end as one of ``writers``, and for rank 0 its ends of all of them.

    Collective over ``world``; rank 0 is no writer. A writer on rank 0's host gets a ring in
    shared memory, another a TCP connection.
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
