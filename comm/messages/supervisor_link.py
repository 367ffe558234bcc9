"""A child's control connection to its supervisor; its loss ends the child."""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from trimaran.comm.env import ChildEnv
from trimaran.comm.errors import ProtocolError
from trimaran.comm.messages.messages import (
    PROTOCOL_VERSION,
    ChildConfig,
    ChildHello,
    ChildRequest,
    ChildState,
    Command,
    FrameBuffer,
    Message,
    Ping,
    Pong,
    encode,
)
from trimaran.comm.transport.greeting import greet
from trimaran.comm.transport.sockets import Address, watch_for_lost_host

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
ORPHAN_EXIT_CODE = 1
_RECEIVE_BYTES = 64 << 10


class SupervisorLink:
    """A child's control connection. Its reading thread ends the process with the supervisor.

    No process may outlive its supervisor: the thread ends the process at once, regardless of
    the other threads.
    """

    def __init__(self, sock: socket.socket, inbox: FrameBuffer) -> None:
        self._sock = sock
        self._inbox = inbox
        self._send_lock = threading.Lock()
        # Held around the queue and its descriptor together: readable means not empty.
        self._queue_lock = threading.Lock()
        self._commands: deque[Command] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closing = False
        self._is_pinged = False
        self._ping_timeout_s = float("inf")
        self._is_alive: Callable[[], bool] = lambda: True
        self._thread = threading.Thread(target=self._read, name="supervisor-link", daemon=True)

    @classmethod
    def connect(
        cls, env: ChildEnv, role: str, rank: int = 0, world_size: int = 1
    ) -> tuple[SupervisorLink, dict[str, Any]]:
        """Connect and say hello; the connection, and the configuration from the supervisor.

        Raises:
            OSError: the supervisor does not listen.
            ProtocolError: the supervisor speaks another version, refuses this child, or lacks
            the token (TCP).
        """
        address = Address.parse(env.supervisor)
        sock = address.connect(CONNECT_TIMEOUT_S)
        hello = ChildHello(
            token=env.token if address.path else "",
            role=role,
            group=env.group,
            rank=rank,
            world_size=world_size,
            pid=os.getpid(),
            host=socket.gethostname(),
            incarnation=env.incarnation,
        )
        inbox = FrameBuffer()
        try:
            if not address.path:
                greet(sock, env.token.encode())
            sock.sendall(encode(hello))
            early = _receive_some(sock, inbox)
            config = _check_answer(early.pop(0))
        except BaseException:
            sock.close()
            raise
        if sock.family != socket.AF_UNIX:
            watch_for_lost_host(sock)
        sock.settimeout(None)
        link = cls(sock, inbox)
        link._take(early)
        link._thread.start()
        return link, config

    def fileno(self) -> int:
        """Readable while commands wait; for epoll and event loops."""
        return self._wake_fd

    def commands(self) -> list[Command]:
        """The commands that came since the last call; does not block."""
        if not self._commands:
            return []
        with self._queue_lock:
            os.eventfd_read(self._wake_fd)
            taken = list(self._commands)
            self._commands.clear()
        return taken

    def expect_pings(self, timeout_s: float) -> None:
        """End this process when no further ping follows the first ping in time.

        Applies to TCP: a connection from another host may stay open for minutes after the loss
        of that host.
        """
        if self._sock.family != socket.AF_UNIX:
            self._ping_timeout_s = timeout_s

    def answer_while(self, is_alive: Callable[[], bool]) -> None:
        """Leave the supervisor's pings unanswered while ``is_alive()`` is False.

        The reading thread answers pings, also when another thread has hung.
        """
        self._is_alive = is_alive

    def state(
        self,
        state: str,
        text: str = "",
        *,
        is_config_error: bool = False,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """Report a change of state; any thread may call this."""
        message = ChildState(
            state=state, text=text, is_config_error=is_config_error, facts=facts or {}
        )
        self._send(message)

    def request(self, request_id: int, verb: str, arguments: dict[str, Any]) -> None:
        """Ask the supervisor for something; its answer comes as a ``reply`` command."""
        self._send(ChildRequest(request_id=request_id, verb=verb, arguments=arguments))

    def close(self) -> None:
        """Leave in order: the supervisor's EOF no longer ends this process."""
        self._is_closing = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._thread.join(timeout=5.0)
        self._sock.close()

    def _send(self, message: Message) -> None:
        with self._send_lock:
            try:
                self._sock.sendall(encode(message))
            except OSError:
                # The reading thread sees the same loss and ends the process.
                logger.debug("a message to the supervisor was lost", exc_info=True)

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while True:
            limit_s = self._ping_timeout_s
            can_wait = not self._is_pinged or limit_s == float("inf")
            if not poll.poll(None if can_wait else 1000 * limit_s):
                self._end_process(f"not heard of for {limit_s:g} s")
                return
            try:
                data = self._sock.recv(_RECEIVE_BYTES)
                messages = self._inbox.feed(data) if data else []
            except (OSError, ProtocolError) as error:
                self._end_process(str(error))
                return
            if not data:
                self._end_process("connection closed")
                return
            self._take(messages)

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Command):
                with self._queue_lock:
                    self._commands.append(message)
                    os.eventfd_write(self._wake_fd, 1)
            elif isinstance(message, Ping):
                self._is_pinged = True
                if self._is_alive():
                    self._send(Pong(payload=message.payload))

    def _end_process(self, reason: str) -> None:
        if self._is_closing:
            return
        logger.error("the supervisor is gone (%s): this process ends", reason)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass
        os._exit(ORPHAN_EXIT_CODE)


def _receive_some(sock: socket.socket, inbox: FrameBuffer) -> list[Message]:
    """Block until at least one message is there."""
    while True:
        data = sock.recv(_RECEIVE_BYTES)
        if not data:
            raise ProtocolError(
                "the supervisor closed the connection before it sent a configuration; its "
                "log says why (a wrong token, or a child it did not start)"
            )
        messages = inbox.feed(data)
        if messages:
            return messages


def _check_answer(answer: Message) -> dict[str, Any]:
    """The configuration in the supervisor's first message."""
    if isinstance(answer, ChildConfig) and answer.protocol_version == PROTOCOL_VERSION:
        return answer.config
    raise ProtocolError(
        f"the supervisor answered {type(answer).__name__} of protocol version "
        f"{getattr(answer, 'protocol_version', 'unknown')}; this process speaks version "
        f"{PROTOCOL_VERSION}. All processes of a run must be of one installation."
    )
