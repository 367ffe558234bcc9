"""Waking the other hosts' first ranks over TCP, so that they sleep in the kernel while idle."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Sequence

from trimaran.comm.errors import PeerLostError
from trimaran.comm.mpi import World
from trimaran.comm.net import dial_any, own_addresses

_ACCEPT_TIMEOUT_S = 60.0
_TOKEN_BYTES = 16
_RECORD = struct.Struct("<Q")


class WakeSender:
    """Rank 0's end: one connection to each host that sleeps."""

    def __init__(self, socks: Sequence[socket.socket]) -> None:
        self._socks = socks

    def wake(self, num_sent: int) -> None:
        """Tell that ``num_sent`` messages have been sent in all.

        Raises:
            PeerLostError: another host is gone, or has left thousands of wake-ups unread.
        """
        for sock in self._socks:
            try:
                sock.send(_RECORD.pack(num_sent), socket.MSG_NOSIGNAL)
            except OSError as error:
                raise PeerLostError(f"the wake line to another host broke: {error}") from error

    def close(self) -> None:
        """End the lines; receivers that sleep see it."""
        for sock in self._socks:
            sock.close()


class WakeReceiver:
    """The other end, in the first rank of another host."""

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
        """Read the records of wake-ups that were not needed, so that none pile up."""
        try:
            self._take(self._sock.recv(4096, socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Give the line back."""
        self._sock.close()

    def _take(self, data: bytes) -> None:
        self._rest += data
        whole = len(self._rest) // _RECORD.size * _RECORD.size
        for (num_sent,) in _RECORD.iter_unpack(self._rest[:whole]):
            self._num_sent = num_sent
        self._rest = self._rest[whole:]


def connect_wake_lines(
    world: World, first_ranks: Sequence[int]
) -> tuple[WakeSender | None, WakeReceiver | None]:
    """Lines from rank 0 to ``first_ranks``; each rank gets its end. Collective."""
    if world.rank == 0:
        with socket.create_server(("", 0), backlog=128) as listener:
            listener.settimeout(_ACCEPT_TIMEOUT_S)
            token = secrets.token_bytes(_TOKEN_BYTES)
            world.comm.bcast((own_addresses(), listener.getsockname()[1], token))
            return WakeSender(_accept(listener, token, len(first_ranks))), None
    candidates, port, token = world.comm.bcast(None)
    if world.rank not in first_ranks:
        return None, None
    sock = dial_any(candidates, port)
    sock.settimeout(None)
    sock.sendall(token)
    _keep_alive(sock)
    return None, WakeReceiver(sock)


def _accept(listener: socket.socket, token: bytes, count: int) -> list[socket.socket]:
    """That many connections that show the token; others are hung up on."""
    socks: list[socket.socket] = []
    while len(socks) < count:
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            raise PeerLostError(
                f"only {len(socks)} of {count} other hosts connected to rank 0 within "
                f"{_ACCEPT_TIMEOUT_S:g} s"
            ) from None
        sock.settimeout(_ACCEPT_TIMEOUT_S)
        if hmac.compare_digest(sock.recv(_TOKEN_BYTES, socket.MSG_WAITALL), token):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            socks.append(sock)
        else:
            sock.close()
    return socks


def _keep_alive(sock: socket.socket) -> None:
    """Have the kernel end the line within about 10 s of the other host's death."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
