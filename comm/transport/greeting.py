"""The greeting of a TCP connection between our processes: a challenge in both directions.

The listener sends a nonce. The dialer answers with a second nonce and an HMAC-SHA256 over both
nonces, keyed with the token of the run; the listener answers with another HMAC. Each end
thereby proves that it holds the token, and the token itself never travels.
"""

from __future__ import annotations

import hmac
import secrets
import socket

from trimaran.comm.errors import ProtocolError

_MAGIC = b"TRM1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_OPENING_BYTES = len(_MAGIC) + _NONCE_BYTES
_ANSWER_BYTES = _NONCE_BYTES + _PROOF_BYTES
# Different labels: a proof of one end cannot be reused as the proof of the other end.
_DIALER, _LISTENER = b"trimaran dialer", b"trimaran listener"

GREETING_TIMEOUT_S = 10.0
"""A dialer that has not greeted within this time is disconnected."""

MAX_UNGREETED = 1024
"""Connections of one listener that have not greeted; the oldest one makes room for another."""


class ListenerGreeting:
    """The listener's half. Holds at most 64 bytes of an unauthenticated peer."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._answer = b""

    @property
    def opening(self) -> bytes:
        """The first bytes on the connection."""
        return _MAGIC + self._nonce

    @property
    def num_missing(self) -> int:
        """Missing bytes of the dialer's answer; 0 once the answer is complete."""
        return _ANSWER_BYTES - len(self._answer)

    def feed(self, data: bytes) -> bytes:
        """Accept received bytes; returns the bytes to send, empty until the dialer's answer is
        complete.

        Raises:
            ProtocolError: the dialer lacks the token, or sends more than its answer.
        """
        if len(data) > self.num_missing:
            raise ProtocolError("the peer's first bytes are no greeting")
        self._answer += data
        if self.num_missing:
            return b""
        theirs, proof = self._answer[:_NONCE_BYTES], self._answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._token, _DIALER, self._nonce, theirs)):
            raise ProtocolError("the peer does not know the token of this run")
        return _proof(self._token, _LISTENER, self._nonce, theirs)


class DialerGreeting:
    """The dialer's half, for a socket that does not block."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._theirs = b""
        self._received = b""
        self.is_done = False
        """Whether the listener has proved that it holds the token."""

    @property
    def num_missing(self) -> int:
        """Missing bytes of the listener's next part; 0 once the listener is authenticated."""
        if self.is_done:
            return 0
        return (_PROOF_BYTES if self._theirs else _OPENING_BYTES) - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Accept at most `num_missing` received bytes; returns the bytes to send.

        Raises:
            ProtocolError: the listener is another program, or lacks the token.
        """
        self._received += data
        if self.num_missing:
            return b""
        received, self._received = self._received, b""
        if not self._theirs:
            if not received.startswith(_MAGIC):
                raise ProtocolError("the listener there is no process of this version")
            self._theirs = received[len(_MAGIC) :]
            return self._nonce + _proof(self._token, _DIALER, self._theirs, self._nonce)
        expected = _proof(self._token, _LISTENER, self._theirs, self._nonce)
        if not hmac.compare_digest(received, expected):
            raise ProtocolError("the listener there does not know the token of this run")
        self.is_done = True
        return b""


def greet(sock: socket.socket, token: bytes) -> None:
    """Greet the listener of a connected blocking socket; reads no byte beyond the greeting.

    Raises:
        OSError: the socket's own time limit passed, or the connection broke.
        ProtocolError: the listener closed the connection, or lacks the token.
    """
    greeting = DialerGreeting(token)
    while not greeting.is_done:
        data = sock.recv(greeting.num_missing)
        if not data:
            raise ProtocolError(
                "the listener closed the connection in the greeting; its log says why (a "
                "token of another run, or another version)"
            )
        sock.sendall(greeting.feed(data))


def _proof(token: bytes, role: bytes, listener_nonce: bytes, dialer_nonce: bytes) -> bytes:
    return hmac.digest(token, role + listener_nonce + dialer_nonce, "sha256")
