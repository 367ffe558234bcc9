"""Both ends of a TCP connection prove the token without sending the token."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from trimaran.comm.errors import ProtocolError
from trimaran.comm.transport.greeting import DialerGreeting, ListenerGreeting, greet

TOKEN = b"0123456789abcdef"


def meet(listener: ListenerGreeting, dialer: DialerGreeting) -> bytes:
    """Bring the two together; all bytes that travelled."""
    opening = listener.opening
    answer = dialer.feed(opening)
    proof = listener.feed(answer)
    dialer.feed(proof)
    return opening + answer + proof


def test_both_ends_prove_the_token_without_sending_the_token():
    dialer = DialerGreeting(TOKEN)

    travelled = meet(ListenerGreeting(TOKEN), dialer)

    assert dialer.is_done
    assert len(travelled) == 132
    assert TOKEN not in travelled


def test_no_two_greetings_are_alike():
    one, other = (meet(ListenerGreeting(TOKEN), DialerGreeting(TOKEN)) for _ in range(2))

    assert not any(one[i : i + 16] == other[i : i + 16] for i in range(4, 117))


def test_a_dialer_with_another_token_is_refused():
    with pytest.raises(ProtocolError, match="the peer does not know the token"):
        meet(ListenerGreeting(TOKEN), DialerGreeting(b"guessed"))


def test_a_listener_that_echoes_the_challenge_is_refused():
    dialer = DialerGreeting(TOKEN)
    answer = dialer.feed(ListenerGreeting(TOKEN).opening)

    with pytest.raises(ProtocolError, match="the listener there does not know the token"):
        dialer.feed(answer[32:])


def test_a_replayed_answer_is_refused():
    answer = DialerGreeting(TOKEN).feed(ListenerGreeting(TOKEN).opening)

    with pytest.raises(ProtocolError):
        ListenerGreeting(TOKEN).feed(answer)


@pytest.mark.parametrize("said", [b"\xff\xff\xff\x7f" + bytes(61), bytes(1 << 20)])
def test_bytes_beyond_an_answer_are_refused_unread(said):
    with pytest.raises(ProtocolError, match="no greeting"):
        ListenerGreeting(TOKEN).feed(said)


def test_a_listener_with_another_protocol_is_named_in_the_error():
    with pytest.raises(ProtocolError, match="no process of this version"):
        DialerGreeting(TOKEN).feed(b"HTTP/1.1 400 Bad Request".ljust(36))


def test_a_greeting_may_arrive_byte_by_byte_and_leaves_later_bytes_unread():
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor() as pool:
        greeting = ListenerGreeting(TOKEN)
        greeted = pool.submit(greet, ours, TOKEN)
        for byte in greeting.opening:
            theirs.sendall(bytes([byte]))
        proof = b""
        while not proof:
            proof = greeting.feed(theirs.recv(1))
        theirs.sendall(proof + b"frame")

        greeted.result(60)

        assert ours.recv(100) == b"frame"


def test_a_listener_that_closes_the_connection_is_an_error_with_a_remedy():
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        with pytest.raises(ProtocolError, match="its log says why"):
            greet(ours, TOKEN)
