"""Rank 0 accepts connections only from ranks with the token."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from trimaran.comm.control import host_connections as host_lines
from trimaran.comm.control.host_connections import accept_ranks
from trimaran.comm.errors import PeerLostError, ProtocolError
from trimaran.comm.transport.greeting import greet

TOKEN = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def dial(listener):
    """A function that connects and sends bytes; all connections are closed in the end."""
    socks = []

    def connect(said: bytes = b"") -> socket.socket:
        socks.append(socket.create_connection(listener.getsockname(), timeout=60))
        socks[-1].sendall(said)
        return socks[-1]

    yield connect
    for sock in socks:
        sock.close()


@pytest.fixture
def rank(dial):
    """A function that begins to greet as a rank does, in a thread, and then says more."""
    threads = []

    def begin(number: int, more: bytes = b"", token: bytes = TOKEN) -> socket.socket:
        sock = dial()

        def run() -> None:
            try:
                greet(sock, token)
                sock.sendall(struct.pack("<I", number) + more)
            except (OSError, ProtocolError):
                pass  # rank 0 has hung up

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return sock

    yield begin
    for thread in threads:
        thread.join()


def is_hung_up_on(sock: socket.socket) -> bool:
    """Whether the peer has closed the connection, after any bytes."""
    try:
        while sock.recv(100):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_peer_that_is_silent_or_lacks_the_token_is_disconnected(
    listener, dial, rank, monkeypatch
):
    monkeypatch.setattr(host_lines, "_GREETING_TIMEOUT_S", 0.05)
    silent = dial()
    stranger = rank(3, token=b"guessed")
    too_long = dial(bytes(65))
    late = threading.Timer(0.3, lambda: [rank(number) for number in (5, 3)])
    late.start()

    lines = accept_ranks(listener, TOKEN, (3, 5))

    late.join()
    assert set(lines) == {3, 5}
    assert all(map(is_hung_up_on, (silent, stranger, too_long)))
    for line in lines.values():
        line.close()


def test_silent_peers_delay_no_rank(listener, dial, rank):
    silent = [dial() for _ in range(50)]
    rank(3)

    # Consecutive time limits would add up to 250 s.
    lines = accept_ranks(listener, TOKEN, (3,), timeout_s=60)

    assert all(map(is_hung_up_on, silent))
    lines[3].close()


def test_bytes_after_the_greeting_stay_in_the_connection(listener, rank):
    rank(3, b"and more")

    (line,) = accept_ranks(listener, TOKEN, (3,)).values()

    assert line.recv(100) == b"and more"
    line.close()


def test_missing_ranks_are_named(listener, rank):
    early = rank(1)

    with pytest.raises(PeerLostError, match=r"ranks \[2, 4\] did not connect .* 0\.5 s"):
        accept_ranks(listener, TOKEN, (4, 1, 2), timeout_s=0.5)

    assert is_hung_up_on(early)
