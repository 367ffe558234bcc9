"""The supervisor's end of the control connections of its children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from trimaran.comm.errors import ProtocolError
from trimaran.comm.messages.guarded_frames import Gate, GuardedFrames
from trimaran.comm.messages.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    ChildHello,
    ChildRequest,
    ChildState,
    Message,
    Ping,
    Pong,
    encode,
)  # fmt: skip
from trimaran.launcher.starters.starter import FRONTEND

_MAX_REPORT_BYTES = 16 << 20
"""Longest frame of a rank or the orchestrator."""


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
        """Queue one message; a closing connection drops the message."""
        if not self._transport.is_closing():
            self._transport.write(encode(message))

    def ping(self) -> None:
        """Send a ping."""
        self.num_unanswered += 1
        self.send(Ping(payload=self.num_unanswered))

    def ask_for_stacks(self) -> None:
        """Have a front end of this host write the stacks of its threads to the log."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

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

    def __init__(self, gate: Gate, events: ConnectionEvents) -> None:
        self._gate = gate
        self._events = events
        self._frames: GuardedFrames | None = None
        self._transport: asyncio.Transport | None = None
        self._connection: ChildConnection | None = None
        """None until the child has sent its greeting."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._frames = self._gate.admit(transport)

    def data_received(self, data: bytes) -> None:
        assert self._frames is not None
        if self._connection is not None:
            self._connection.num_unanswered = 0
        try:
            self._frames.feed(data, self._receive)
        except ProtocolError as error:
            self._frames.refuse(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        if self._frames is not None:
            self._frames.lost()
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
            raise ProtocolError(f"unexpected {type(message).__name__}")

    def _open(self, message: Message) -> None:
        assert self._frames is not None and self._transport is not None
        if not isinstance(message, ChildHello):
            raise ProtocolError(f"{type(message).__name__} instead of ChildHello")
        if not self._gate.accepts(message.token):
            raise ProtocolError("wrong token")
        if message.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version {message.protocol_version}")
        # A front end may send its list of loaded models; ranks report their states.
        is_frontend = message.role == FRONTEND
        self._frames.open(MAX_FRAME_BYTES if is_frontend else _MAX_REPORT_BYTES)
        self._connection = ChildConnection(message, self._transport)
        self._events.on_hello(self._connection)


async def listen(sock: socket.socket, token: str, events: ConnectionEvents) -> asyncio.Server:
    """Accept children's connections on a listening socket, which the server owns from now
    on.
    """
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    is_remote = sock.family != socket.AF_UNIX
    gate = Gate("the supervisor", token, is_remote=is_remote)
    if is_remote:
        return await loop.create_server(lambda: _ChildProtocol(gate, events), sock=sock)
    return await loop.create_unix_server(lambda: _ChildProtocol(gate, events), sock=sock)
