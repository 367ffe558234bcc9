"""TCP connections between rank 0 and ranks of other hosts, and wake-ups over them.

They carry messages whose sender or receiver must not wait inside MPI.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable, Sequence

from trimaran.comm.errors import PeerLostError, ProtocolError
from trimaran.comm.mpi import World
from trimaran.comm.transport.greeting import MAX_UNGREETED, ListenerGreeting, greet
from trimaran.comm.transport.sockets import dial, listen_address, watch_for_lost_host

_ACCEPT_TIMEOUT_S = 60.0
_GREETING_TIMEOUT_S = 5.0
_TOKEN_BYTES = 32
_RANK = struct.Struct("<I")
"""The sender's rank, after the greeting."""

_RECORD = struct.Struct("<Q")


def connect_to_rank_0(
    world: World, ranks: Iterable[int]
) -> tuple[socket.socket | None, dict[int, socket.socket]]:
    """The connection of a rank in ``ranks`` to rank 0; on rank 0 all connections, by rank.

    Collective over ``world``; ``ranks`` excludes rank 0. The sockets block without a limit,
    and the kernel ends the connections soon after the other host is lost.

    Raises:
        PeerLostError: on rank 0, a rank did not connect in time; on another rank, the
            greeting failed.
        ConfigError: on another rank, rank 0 cannot be reached.
    """
    if world.rank == 0:
        with socket.create_server((listen_address(), 0), backlog=128) as listener:
            token = secrets.token_bytes(_TOKEN_BYTES)
            world.comm.bcast((*listener.getsockname(), token))
            return None, accept_ranks(listener, token, ranks)
    host, port, token = world.comm.bcast(None)
    if world.rank not in ranks:
        return None, {}
    sock = dial(host, port)
    try:
        greet(sock, token)
        sock.sendall(_RANK.pack(world.rank))
    except (OSError, ProtocolError) as error:
        sock.close()
        raise PeerLostError(
            f"rank 0 at {host}:{port} did not take the greeting: {error}"
        ) from error
    return _prepared(sock), {}


def accept_ranks(
    listener: socket.socket,
    token: bytes,
    ranks: Iterable[int],
    timeout_s: float = _ACCEPT_TIMEOUT_S,
) -> dict[int, socket.socket]:
    """A connection of each rank; peers without the token are disconnected.

    Peers greet concurrently: a silent peer delays no rank.

    Raises:
        PeerLostError: not all connected within ``timeout_s``.
    """
    arrivals = _Arrivals(listener, token, set(ranks))
    deadline = time.monotonic() + timeout_s
    try:
        while arrivals.missing:
            if time.monotonic() > deadline:
                for sock in arrivals.socks.values():
                    sock.close()
                raise PeerLostError(
                    f"ranks {sorted(arrivals.missing)} did not connect to rank 0 within "
                    f"{timeout_s:g} s"
                )
            arrivals.take(deadline)
    finally:
        arrivals.close()
    return arrivals.socks


class _Caller:
    """A connected peer whose rank is not known yet."""

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.deadline = time.monotonic() + _GREETING_TIMEOUT_S
        self._greeting = ListenerGreeting(token)
        self._rank = b""
        sock.send(self._greeting.opening, socket.MSG_NOSIGNAL)

    def receive(self) -> int | None:
        """The rank of this peer; None until the greeting is complete.

        Raises:
            OSError: the connection broke.
            ProtocolError: the peer does not know the token, or has closed.
        """
        # No byte beyond the greeting: what follows belongs to the connection's user.
        num_missing = self._greeting.num_missing or _RANK.size - len(self._rank)
        data = self.sock.recv(num_missing)
        if not data:
            raise ProtocolError("the peer closed the connection in the greeting")
        if self._greeting.num_missing:
            if answer := self._greeting.feed(data):
                self.sock.send(answer, socket.MSG_NOSIGNAL)
            return None
        self._rank += data
        return int(_RANK.unpack(self._rank)[0]) if len(self._rank) == _RANK.size else None


class _Arrivals:
    """The peers that rank 0 polls together while waiting for ranks of other hosts."""

    def __init__(self, listener: socket.socket, token: bytes, missing: set[int]) -> None:
        self.missing = missing
        self.socks: dict[int, socket.socket] = {}
        self._token = token
        self._listener = listener
        self._callers: dict[int, _Caller] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def take(self, deadline: float) -> None:
        """Wait for data until ``deadline`` at most, and process the data."""
        first = min((each.deadline for each in self._callers.values()), default=deadline)
        wait_s = max(min(first, deadline) - time.monotonic(), 0.001)
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fd in self._callers:
                self._hear(self._callers[key.fd])
        now = time.monotonic()
        for caller in [each for each in self._callers.values() if each.deadline < now]:
            self._forget(caller).close()

    def close(self) -> None:
        """Disconnect the peers that have not greeted; the listener blocks again."""
        for caller in list(self._callers.values()):
            self._forget(caller).close()
        self._selector.close()
        self._listener.setblocking(True)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # The peer has gone again, or descriptors are used up for a moment.
        if len(self._callers) >= MAX_UNGREETED:
            self._forget(next(iter(self._callers.values()))).close()
        try:
            caller = _Caller(sock, self._token)
        except OSError:
            sock.close()
            return
        self._callers[sock.fileno()] = caller
        self._selector.register(sock, selectors.EVENT_READ)

    def _hear(self, caller: _Caller) -> None:
        try:
            rank = caller.receive()
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            rank = -1
        if rank is None:
            return
        sock = self._forget(caller)
        if rank in self.missing:
            self.missing.discard(rank)
            self.socks[rank] = _prepared(sock)
        else:
            sock.close()

    def _forget(self, caller: _Caller) -> socket.socket:
        del self._callers[caller.sock.fileno()]
        self._selector.unregister(caller.sock)
        return caller.sock


def _prepared(sock: socket.socket) -> socket.socket:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    watch_for_lost_host(sock)
    return sock


class WakeSender:
    """Rank 0's end: one connection to the first rank of each other host."""

    def __init__(self, socks: Sequence[socket.socket]) -> None:
        self._socks = socks
        for sock in socks:
            sock.setblocking(False)

    def wake(self, num_sent: int) -> None:
        """Wake the other hosts: ``num_sent`` messages have been sent since the start.

        Raises:
            PeerLostError: the connection to another host is lost, or thousands of wake-ups are
            unread.
        """
        for sock in self._socks:
            try:
                sock.send(_RECORD.pack(num_sent), socket.MSG_NOSIGNAL)
            except OSError as error:
                raise PeerLostError(f"the wake line to another host broke: {error}") from error

    def close(self) -> None:
        """Close the connections, which wakes sleeping receivers."""
        for sock in self._socks:
            sock.close()


class WakeReceiver:
    """The end of the first rank of another host."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""
        self._num_sent = 0

    def wait_beyond(self, num_read: int) -> None:
        """Sleep until more than ``num_read`` messages have been sent.

        Raises:
            PeerLostError: rank 0 is gone.
        """
        while self._num_sent <= num_read:
            data = self._sock.recv(4096)
            if not data:
                raise PeerLostError("rank 0 is gone: its wake line was closed")
            self._take(data)

    def take_waiting(self) -> None:
        """Discard wake-ups that were not needed, which would fill the socket's buffer."""
        try:
            self._take(self._sock.recv(4096, socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def _take(self, data: bytes) -> None:
        self._rest += data
        whole = len(self._rest) // _RECORD.size * _RECORD.size
        for (num_sent,) in _RECORD.iter_unpack(self._rest[:whole]):
            self._num_sent = num_sent
        self._rest = self._rest[whole:]


def connect_wakeups(
    world: World, first_ranks: Sequence[int]
) -> tuple[WakeSender | None, WakeReceiver | None]:
    """Wake-up connections from rank 0 to ``first_ranks``; each rank's end. Collective."""
    own, socks = connect_to_rank_0(world, first_ranks)
    if world.rank == 0:
        return WakeSender(list(socks.values())), None
    return None, None if own is None else WakeReceiver(own)
