"""The supervisor's end of the control connections of its children."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

from trimaran.comm.errors import ProtocolError
from trimaran.comm.messages.messages import (
    PROTOCOL_VERSION,
    ChildHello,
    ChildRequest,
    ChildState,
    FrameBuffer,
    Message,
    Ping,
    Pong,
    encode,
)  # fmt: skip

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0


class ChildConnection:
    """The control connection of one child that has shown the token of this run."""

    def __init__(self, hello: ChildHello, transport: asyncio.Transport) -> None:
        self.hello = hello
        self.num_unanswered = 0
        """Pings sent since the child's last message."""

        self._transport = transport

    @property
    def pid(self) -> int:
        """The child's process id on its host."""
        return self.hello.pid

    @property
    def rank(self) -> int:
        """The child's rank in its group; 0 for a front end."""
        return self.hello.rank

    def send(self, message: Message) -> None:
        """Queue one message; a connection that is closing drops it."""
        if not self._transport.is_closing():
            self._transport.write(encode(message))

    def ping(self) -> None:
        """Send a ping."""
        self.num_unanswered += 1
        self.send(Ping(payload=self.num_unanswered))

    def close(self) -> None:
        """Close this end; the child exits then."""
        self._transport.abort()


@dataclass(frozen=True, slots=True)
class ConnectionEvents:
    """The callbacks of the control connections."""

    on_hello: Callable[[ChildConnection], None]
    on_state: Callable[[ChildConnection, ChildState], None]
    on_request: Callable[[ChildConnection, ChildRequest], None]
    on_lost: Callable[[ChildConnection], None]
    """The child's end closed: the child died, or is about to."""


class _ChildProtocol(asyncio.Protocol):
    """Reads one socket. A peer without the token of this run is disconnected."""

    def __init__(self, token: str, events: ConnectionEvents) -> None:
        self._token = token
        self._events = events
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._connection: ChildConnection | None = None
        """None until the child has sent its greeting."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(_HELLO_TIMEOUT_S, self._refuse, "no ChildHello")

    def data_received(self, data: bytes) -> None:
        if self._connection is not None:
            self._connection.num_unanswered = 0
        try:
            messages = self._frames.feed(data)
        except ProtocolError as error:
            self._refuse(str(error))
            return
        for message in messages:
            self._receive(message)

    def connection_lost(self, error: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._connection is not None:
            self._events.on_lost(self._connection)

    def _receive(self, message: Message) -> None:
        if self._connection is None:
            self._open(message)
        elif isinstance(message, ChildState):
            self._events.on_state(self._connection, message)
        elif isinstance(message, ChildRequest):
            self._events.on_request(self._connection, message)
        elif not isinstance(message, Pong):
            self._refuse(f"unexpected {type(message).__name__}")

    def _open(self, message: Message) -> None:
        if not isinstance(message, ChildHello):
            self._refuse(f"{type(message).__name__} instead of ChildHello")
        elif not hmac.compare_digest(message.token.encode(), self._token.encode()):
            self._refuse("wrong token")
        elif message.protocol_version != PROTOCOL_VERSION:
            self._refuse(f"protocol version {message.protocol_version}")
        elif self._transport is not None:
            if self._deadline is not None:
                self._deadline.cancel()
            self._connection = ChildConnection(message, self._transport)
            self._events.on_hello(self._connection)

    def _refuse(self, reason: str) -> None:
        logger.warning("closed a connection to the supervisor: %s", reason)
        if self._transport is not None:
            self._transport.abort()


async def listen(sock: socket.socket, token: str, events: ConnectionEvents) -> asyncio.Server:
    """Accept children's connections on a listening socket, which the server owns from now
    on.
    """
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        return await loop.create_unix_server(lambda: _ChildProtocol(token, events), sock=sock)
    return await loop.create_server(lambda: _ChildProtocol(token, events), sock=sock)
