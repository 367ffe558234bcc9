"""Connections to rank 0 are accepted only from ranks with the token."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from trimaran.comm.control import host_connections as host_lines
from trimaran.comm.control.host_connections import accept_ranks
from trimaran.comm.errors import PeerLostError

TOKEN = b"0123456789abcdef"


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def dial(listener):
    """A function that connects and sends bytes; all connections are closed in the end."""
    socks = []

    def connect(said: bytes) -> socket.socket:
        socks.append(socket.create_connection(listener.getsockname()))
        socks[-1].sendall(said)
        return socks[-1]

    yield connect
    for sock in socks:
        sock.close()


def test_a_peer_that_is_silent_or_shows_another_token_is_disconnected(
    listener, dial, monkeypatch
):
    monkeypatch.setattr(host_lines, "_GREETING_TIMEOUT_S", 0.05)
    silent = dial(b"")
    stranger = dial(struct.pack("<16sI", b"guessed", 3))
    too_short = dial(TOKEN)
    again = [dial(struct.pack("<16sI", TOKEN, rank)) for rank in (5, 3, 3)]

    lines = accept_ranks(listener, TOKEN, (3, 5))

    assert set(lines) == {3, 5}
    for sock in (silent, stranger, too_short):
        assert sock.recv(1) == b""
    lines[3].sendall(b"to rank 3")
    assert again[1].recv(100) == b"to rank 3"
    for line in lines.values():
        line.close()


def test_a_greeting_may_come_in_pieces(listener, dial):
    greeting = struct.pack("<16sI", TOKEN, 3)
    slow = dial(greeting[:7])
    rest = threading.Timer(0.1, slow.sendall, [greeting[7:] + b"and more"])
    rest.start()

    (line,) = accept_ranks(listener, TOKEN, (3,)).values()

    rest.join()
    assert line.recv(100) == b"and more"
    line.close()


def test_ranks_that_do_not_come_are_named(listener, dial):
    early = dial(struct.pack("<16sI", TOKEN, 1))

    with pytest.raises(PeerLostError, match=r"ranks \[2, 4\] did not connect .* 0\.05 s"):
        accept_ranks(listener, TOKEN, (4, 1, 2), timeout_s=0.05)

    assert early.recv(1) == b""
