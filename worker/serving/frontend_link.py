"""Rank 0's connections to the front ends: requests in, step outputs out, never blocking."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import time
from dataclasses import dataclass, replace

from trimaran.comm.errors import ProtocolError
from trimaran.comm.messages.messages import (
    PROTOCOL_VERSION,
    EngineHello,
    FrameBuffer,
    FrontendHello,
    Message,
    Ping,
    Pong,
    encode,
)
from trimaran.comm.transport.greeting import DialerGreeting
from trimaran.comm.transport.sockets import Address

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 64 << 20
"""Bytes that a front end may leave unread; beyond, it is dropped and its requests end."""

_RECEIVE_BYTES = 256 << 10
_MAX_RECEIVES = 16
_SELECT_END = 1024
"""File descriptors from this number on need `epoll`, whose timeouts are in milliseconds."""

_FIRST_REDIAL_S = 0.05
_LAST_REDIAL_S = 1.0
_HELLO_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message from a connection; None means that the connection is lost."""

    source: int
    message: Message | None


class _Connection:
    """A connection to a front end; ``source`` is a new number for every attempt."""

    def __init__(self, source: int, address: Address, hello: EngineHello) -> None:
        self.source = source
        self.address = address
        self.is_open = False
        self.inbox = FrameBuffer()
        self._greeting: DialerGreeting | None = None
        self._hello = hello
        self.unsent = bytearray()
        if address.path:
            self.unsent += encode(hello)
        else:
            # The challenge first: the token stays out of what travels between hosts.
            self._greeting = DialerGreeting(hello.token.encode())
            self._hello = replace(hello, token="")
        self.hello_deadline = time.monotonic() + _HELLO_TIMEOUT_S
        family = socket.AF_UNIX if address.path else socket.AF_INET
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        if not address.path:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = self.sock.connect_ex(address.path or (address.host, address.port))
        if code not in (0, errno.EINPROGRESS):
            self.sock.close()
            raise OSError(code, os.strerror(code))

    @property
    def is_greeting(self) -> bool:
        """Whether the front end has yet to prove that it holds the token of this run."""
        return self._greeting is not None

    def flush(self) -> None:
        """Send as much as the socket takes now."""
        while self.unsent:
            try:
                sent = self.sock.send(self.unsent)
            except BlockingIOError:
                return
            del self.unsent[:sent]

    def receive(self) -> list[Message]:
        """The received messages, up to a limit.

        Raises:
            OSError: the front end has closed the connection.
            ProtocolError: the listener at a front end's address does not belong to this run.
        """
        if self._greeting is not None:
            self._greet(self._greeting)
            return []
        messages: list[Message] = []
        # A limit, so that a flood of requests cannot delay the next step.
        for _ in range(_MAX_RECEIVES):
            try:
                data = self.sock.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            if not data:
                if messages:
                    # Return the front end's last messages, such as a refusal; the next call
                    # finds the end.
                    break
                raise ConnectionResetError("connection closed by the front end")
            messages += self.inbox.feed(data)
        return messages

    def _greet(self, greeting: DialerGreeting) -> None:
        """Take a part of the greeting; the hello follows the front end's proof."""
        try:
            data = self.sock.recv(greeting.num_missing)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("connection closed by the front end in the greeting")
        self.unsent += greeting.feed(data)
        if greeting.is_done:
            self._greeting = None
            self.unsent += encode(self._hello)
        self.flush()


class _Peer:
    """A front end's address, and when to connect to it next."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.connection: _Connection | None = None
        self.next_dial = 0.0
        self.redial_s = _FIRST_REDIAL_S


class FrontendLinks:
    """All front ends of the run. One thread only; only `poll` may block, if asked to.

    Lost connections are opened again until the links are closed. A front end that reads slowly
    costs memory up to `MAX_UNSENT_BYTES`, never time.
    """

    def __init__(self, addresses: tuple[str, ...], hello: EngineHello, wake_fd: int) -> None:
        self._hello = hello
        self._peers = [_Peer(Address.parse(address)) for address in addresses]
        self._by_fd: dict[int, _Peer] = {}
        self._by_source: dict[int, _Connection] = {}
        self._num_dials = 0
        self._lost: list[Arrival] = []
        self._epoll = select.epoll()
        self._epoll.register(wake_fd, select.EPOLLIN)

    def poll(self, is_busy: bool, wait_s: float = 0.0) -> list[Arrival]:
        """The messages that have arrived from front ends.

        With ``is_busy`` this waits at most ``wait_s``. Otherwise it sleeps until a message
        arrives, the wake descriptor becomes readable or a connection attempt is due.

        Raises:
            ProtocolError: a front end refused this engine.
        """
        next_dial_s = self._dial()
        arrivals, self._lost = self._lost, []
        timeout = -1 if next_dial_s is None else next_dial_s
        if is_busy or arrivals:
            timeout = 0
            if wait_s and not arrivals:
                self._await(wait_s)
        for fd, events in self._epoll.poll(timeout):
            # Skip a descriptor whose connection was lost earlier in this round.
            if fd in self._by_fd:
                arrivals += self._serve(self._by_fd[fd], events)
        return arrivals + self._take_lost()

    def _await(self, wait_s: float) -> None:
        """Wait until a message arrives, at most ``wait_s``, to about 0.1 ms."""
        if self._epoll.fileno() < _SELECT_END:
            select.select([self._epoll], [], [], wait_s)
        else:
            self._epoll.poll(wait_s)

    def send(self, source: int, message: Message) -> None:
        """Queue a message; messages to a lost connection are dropped."""
        connection = self._by_source.get(source)
        if connection is None:
            return
        was_empty = not connection.unsent
        connection.unsent += encode(message)
        if was_empty or len(connection.unsent) > MAX_UNSENT_BYTES:
            self._flush(connection)

    def send_all(self, message: Message, but: int | None = None) -> None:
        """Queue a message for every open front end except ``but``."""
        for connection in list(self._by_source.values()):
            if connection.source != but:
                self.send(connection.source, message)

    def is_local(self, source: int) -> bool:
        """Whether this front end is on this host; False if its connection is lost."""
        connection = self._by_source.get(source)
        return connection is not None and bool(connection.address.path)

    def num_unsent(self, source: int) -> int:
        """Bytes that this front end has not read yet."""
        connection = self._by_source.get(source)
        return 0 if connection is None else len(connection.unsent)

    def is_open(self, source: int) -> bool:
        """Whether this front end is still connected."""
        return source in self._by_source

    @property
    def num_open(self) -> int:
        """Front ends that have accepted this engine."""
        return len(self._by_source)

    def close(self) -> None:
        """Let each socket take unsent bytes once more, then close all."""
        for peer in self._peers:
            if peer.connection is not None:
                self._close(peer, peer.connection)
        self._epoll.close()

    # ---- one connection -----------------------------------------------------------------

    def _dial(self) -> float | None:
        """Connect to the front ends that are due; seconds until the next is due, None if
        none."""
        now = time.monotonic()
        waits = []
        for peer in self._peers:
            if peer.connection is None and peer.next_dial <= now:
                self._dial_one(peer)
            if peer.connection is None:
                waits.append(peer.next_dial - now)
            elif not peer.connection.is_open:
                waits.append(max(peer.connection.hello_deadline - now, 0.0))
                if peer.connection.hello_deadline < now:
                    self._lose(peer, "it did not answer the greeting")
        return max(min(waits), 0.001) if waits else None

    def _dial_one(self, peer: _Peer) -> None:
        self._num_dials += 1
        try:
            connection = _Connection(self._num_dials, peer.address, self._hello)
        except OSError as error:
            self._schedule_redial(peer, str(error))
            return
        peer.connection = connection
        self._by_fd[connection.sock.fileno()] = peer
        self._epoll.register(connection.sock, select.EPOLLIN | select.EPOLLOUT)

    def _schedule_redial(self, peer: _Peer, reason: str) -> None:
        if peer.redial_s == _FIRST_REDIAL_S:
            logger.warning(
                "front end %s does not answer (%s): redialling", peer.address, reason
            )
        peer.next_dial = time.monotonic() + peer.redial_s
        peer.redial_s = min(peer.redial_s * 1.5, _LAST_REDIAL_S)

    def _serve(self, peer: _Peer, events: int) -> list[Arrival]:
        connection = peer.connection
        assert connection is not None
        try:
            if events & select.EPOLLOUT:
                connection.flush()
                self._watch(connection)
            if events & ~select.EPOLLOUT:
                was_greeting = connection.is_greeting
                messages = connection.receive()
                if was_greeting:
                    self._watch(connection)
                return self._sort(peer, connection, messages)
        except OSError as error:
            self._lose(peer, str(error))
        return []

    def _sort(
        self, peer: _Peer, connection: _Connection, messages: list[Message]
    ) -> list[Arrival]:
        if messages and not connection.is_open:
            self._greet(peer, connection, messages.pop(0))
        arrivals = []
        for message in messages:
            if isinstance(message, Ping):
                self.send(connection.source, Pong(payload=message.payload))
            elif not isinstance(message, Pong):
                arrivals.append(Arrival(connection.source, message))
        return arrivals

    def _greet(self, peer: _Peer, connection: _Connection, answer: Message) -> None:
        if not isinstance(answer, FrontendHello):
            raise ProtocolError(f"front end {peer.address} sent {type(answer).__name__} first")
        if not answer.accepted or answer.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"front end {peer.address} refused this engine: {answer.reason or 'no reason'} "
                f"(its protocol version {answer.protocol_version}, ours {PROTOCOL_VERSION})"
            )
        connection.is_open = True
        peer.redial_s = _FIRST_REDIAL_S
        self._by_source[connection.source] = connection
        logger.info("serving front end %d at %s", answer.frontend, peer.address)

    def _flush(self, connection: _Connection) -> None:
        peer = self._by_fd[connection.sock.fileno()]
        try:
            connection.flush()
        except OSError as error:
            self._lose(peer, str(error))
            return
        if len(connection.unsent) > MAX_UNSENT_BYTES:
            self._lose(peer, f"it left {len(connection.unsent)} bytes unread")
            return
        self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        """Ask for write events only while bytes wait to be written."""
        wanted = select.EPOLLIN | (select.EPOLLOUT if connection.unsent else 0)
        self._epoll.modify(connection.sock, wanted)

    def _lose(self, peer: _Peer, reason: str) -> None:
        connection = peer.connection
        assert connection is not None
        if connection.is_open:
            logger.warning("front end %s is lost (%s)", peer.address, reason)
            self._lost.append(Arrival(connection.source, None))
        connection.unsent.clear()
        self._close(peer, connection)
        self._schedule_redial(peer, reason)

    def _close(self, peer: _Peer, connection: _Connection) -> None:
        try:
            connection.flush()
        except OSError:
            pass
        self._epoll.unregister(connection.sock)
        del self._by_fd[connection.sock.fileno()]
        self._by_source.pop(connection.source, None)
        connection.sock.close()
        peer.connection = None

    def _take_lost(self) -> list[Arrival]:
        lost, self._lost = self._lost, []
        return lost
