"""Waking the other hosts' first ranks over TCP, so that they sleep in the kernel while idle."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from trimaran.comm.control.host_lines import connect_lines
from trimaran.comm.errors import PeerLostError
from trimaran.comm.mpi import World

_RECORD = struct.Struct("<Q")


class WakeSender:
    """Rank 0's end: one connection to each host that sleeps."""

    def __init__(self, socks: Sequence[socket.socket]) -> None:
        self._socks = socks
        for sock in socks:
            sock.setblocking(False)

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
    own, lines = connect_lines(world, first_ranks)
    if world.rank == 0:
        return WakeSender(list(lines.values())), None
    return None, None if own is None else WakeReceiver(own)
