"""TCP connections between rank 0 and ranks of other hosts, and wake-ups over them.

They carry messages whose sender or receiver must not wait inside MPI.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Sequence

from trimaran.comm.errors import PeerLostError
from trimaran.comm.mpi import World
from trimaran.comm.transport.sockets import dial_any, own_addresses, watch_for_lost_host

_ACCEPT_TIMEOUT_S = 60.0
_GREETING_TIMEOUT_S = 5.0
_TOKEN_BYTES = 16
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sI")
"""The token and the rank of the sender."""

_RECORD = struct.Struct("<Q")


def connect_to_rank_0(
    world: World, ranks: Iterable[int]
) -> tuple[socket.socket | None, dict[int, socket.socket]]:
    """This rank's connection to rank 0 if it is in ``ranks``; on rank 0 all of them, by rank.

    Collective over ``world``; ``ranks`` excludes rank 0. The sockets block without a limit,
    and the kernel ends the connections soon after the other host is lost.

    Raises:
        PeerLostError: on rank 0, a rank did not connect in time.
        ConfigError: on another rank, rank 0 cannot be reached.
    """
    if world.rank == 0:
        with socket.create_server(("", 0), backlog=128) as listener:
            token = secrets.token_bytes(_TOKEN_BYTES)
            world.comm.bcast((own_addresses(), listener.getsockname()[1], token))
            return None, accept_ranks(listener, token, ranks)
    candidates, port, token = world.comm.bcast(None)
    if world.rank not in ranks:
        return None, {}
    sock = dial_any(candidates, port)
    sock.sendall(_GREETING.pack(token, world.rank))
    return _prepared(sock), {}


def accept_ranks(
    listener: socket.socket,
    token: bytes,
    ranks: Iterable[int],
    timeout_s: float = _ACCEPT_TIMEOUT_S,
) -> dict[int, socket.socket]:
    """A connection of each rank; peers that do not show the token are disconnected.

    Raises:
        PeerLostError: not all connected within ``timeout_s``.
    """
    socks: dict[int, socket.socket] = {}
    missing = set(ranks)
    deadline = time.monotonic() + timeout_s
    while missing:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            for sock in socks.values():
                sock.close()
            raise PeerLostError(
                f"ranks {sorted(missing)} did not connect to rank 0 within {timeout_s:g} s"
            ) from None
        rank = _rank_of(sock, token)
        if rank in missing:
            missing.discard(rank)
            socks[rank] = _prepared(sock)
        else:
            sock.close()
    return socks


def _rank_of(sock: socket.socket, token: bytes) -> int:
    """The rank that connected; -1 if the peer does not show the token in time."""
    deadline = time.monotonic() + _GREETING_TIMEOUT_S
    greeting = b""
    try:
        # A greeting may come in several pieces.
        while len(greeting) < _GREETING.size:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            if not (piece := sock.recv(_GREETING.size - len(greeting))):
                return -1
            greeting += piece
    except OSError:
        return -1
    shown, rank = _GREETING.unpack(greeting)
    return rank if hmac.compare_digest(shown, token) else -1


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
            PeerLostError: another host is gone, or has left thousands of wake-ups unread.
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
