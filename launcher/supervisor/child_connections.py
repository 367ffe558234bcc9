"""The supervisor's end of its children's connections."""

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


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """Whom a connection tells what."""

    on_hello: Callable[[Link], None]
    on_state: Callable[[Link, ChildState], None]
    on_request: Callable[[Link, ChildRequest], None]
    on_lost: Callable[[Link], None]
    """The child's end closed: it died, or is about to."""


class Link(asyncio.Protocol):
    """One child's connection. Without the run's token it is closed unheard."""

    def __init__(self, token: str, events: LinkEvents) -> None:
        self._token = token
        self._events = events
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.hello: ChildHello | None = None
        self.num_unanswered = 0
        """Pings sent since the child was last heard."""

    @property
    def pid(self) -> int:
        """The child's process id on its host."""
        return self.hello.pid if self.hello else 0

    @property
    def rank(self) -> int:
        """The child's rank in its group; 0 for a front end."""
        return self.hello.rank if self.hello else 0

    def send(self, message: Message) -> None:
        """Queue one message; nothing happens on a connection that is closing."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    def ping(self) -> None:
        """Ask for a sign of life."""
        self.num_unanswered += 1
        self.send(Ping(payload=self.num_unanswered))

    def close(self) -> None:
        """Close this end, at which the child exits."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(_HELLO_TIMEOUT_S, self._refuse, "no ChildHello")

    def data_received(self, data: bytes) -> None:
        self.num_unanswered = 0
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
        if self.hello is not None:
            self._events.on_lost(self)

    def _receive(self, message: Message) -> None:
        if self.hello is None:
            self._open(message)
        elif isinstance(message, ChildState):
            self._events.on_state(self, message)
        elif isinstance(message, ChildRequest):
            self._events.on_request(self, message)
        elif not isinstance(message, Pong):
            self._refuse(f"unexpected {type(message).__name__}")

    def _open(self, message: Message) -> None:
        if not isinstance(message, ChildHello):
            self._refuse(f"{type(message).__name__} instead of ChildHello")
        elif not hmac.compare_digest(message.token.encode(), self._token.encode()):
            self._refuse("wrong token")
        elif message.protocol_version != PROTOCOL_VERSION:
            self._refuse(f"protocol version {message.protocol_version}")
        else:
            if self._deadline is not None:
                self._deadline.cancel()
            self.hello = message
            self._events.on_hello(self)

    def _refuse(self, reason: str) -> None:
        logger.warning("closed a connection to the supervisor: %s", reason)
        self.close()


async def listen(sock: socket.socket, token: str, events: LinkEvents) -> asyncio.Server:
    """Accept children's connections on a listening socket, which belongs to the server now."""
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        return await loop.create_unix_server(lambda: Link(token, events), sock=sock)
    return await loop.create_server(lambda: Link(token, events), sock=sock)
