"""Frames of accepted connections: little memory and little time for each before its hello."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable

from trimaran.comm.messages.messages import MAX_FRAME_BYTES, FrameBuffer, Message
from trimaran.comm.transport.greeting import (
    GREETING_TIMEOUT_S,
    MAX_UNGREETED,
    ListenerGreeting,
)

logger = logging.getLogger(__name__)

MAX_HELLO_BYTES = 64 << 10
"""Longest frame of a connection whose hello has not been accepted."""

_LOG_PERIOD_S = 1.0


class Gate:
    """The connections of one listening socket that have not greeted yet.

    Each has `GREETING_TIMEOUT_S`, and there are at most ``max_ungreeted``: the oldest one is
    closed for a newer one, so that silent connections do not keep a child out, which greets
    within milliseconds. Used on the event loop only.
    """

    def __init__(
        self,
        title: str,
        token: str,
        *,
        is_remote: bool,
        timeout_s: float = GREETING_TIMEOUT_S,
        max_ungreeted: int = MAX_UNGREETED,
    ) -> None:
        """``title`` names the listener in log lines. ``is_remote``: peers dial over TCP, and
        are challenged before their first frame; else their hello carries the token."""
        self._title = title
        self._token = token
        self._is_remote = is_remote
        self._timeout_s = timeout_s
        self._max_ungreeted = max_ungreeted
        self._ungreeted: dict[GuardedFrames, asyncio.TimerHandle] = {}
        self._next_line = 0.0
        self._num_untold = 0

    def admit(self, transport: asyncio.Transport) -> GuardedFrames:
        """Take a new connection, which has to greet in time."""
        greeting = ListenerGreeting(self._token.encode()) if self._is_remote else None
        frames = GuardedFrames(self, transport, greeting)
        if len(self._ungreeted) >= self._max_ungreeted:
            oldest = next(iter(self._ungreeted))
            self.refuse(oldest, f"{self._max_ungreeted} others have not greeted either")
        loop = asyncio.get_running_loop()
        text = f"no greeting within {self._timeout_s:g} s"
        self._ungreeted[frames] = loop.call_later(self._timeout_s, self.refuse, frames, text)
        return frames

    def accepts(self, token: str) -> bool:
        """Whether a hello's token opens a connection; over TCP the challenge has done so."""
        if self._is_remote:
            return True
        is_text = isinstance(token, str)
        return is_text and hmac.compare_digest(token.encode(), self._token.encode())

    def refuse(self, frames: GuardedFrames, reason: str) -> None:
        """Close a connection at once; at most one line a second says so in the log."""
        self.release(frames)
        frames.abort()
        now = asyncio.get_running_loop().time()
        if now < self._next_line:
            self._num_untold += 1
            return
        more = f" ({self._num_untold} more since the last such line)" * bool(self._num_untold)
        self._next_line, self._num_untold = now + _LOG_PERIOD_S, 0
        logger.warning("closed a connection to %s: %s%s", self._title, reason, more)

    def release(self, frames: GuardedFrames) -> None:
        """Forget a connection that has greeted, or is gone. May be called twice."""
        timer = self._ungreeted.pop(frames, None)
        if timer is not None:
            timer.cancel()


class GuardedFrames:
    """Cuts what one connection sends into messages, under its gate's rules until `open`."""

    def __init__(
        self, gate: Gate, transport: asyncio.Transport, greeting: ListenerGreeting | None
    ) -> None:
        self._gate = gate
        self._transport = transport
        self._greeting = greeting
        self._frames = FrameBuffer(MAX_HELLO_BYTES)
        if greeting is not None:
            transport.write(greeting.opening)

    def feed(self, data: bytes, take: Callable[[Message], None]) -> None:
        """Hand every message that is complete now to ``take``.

        Raises:
            ProtocolError: no greeting, a wrong one, or a frame that is too long or broken.
        """
        if self._greeting is not None:
            answer = self._greeting.feed(data)
            if answer:
                self._transport.write(answer)
                self._greeting = None
            return
        for message in self._frames.feed(data):
            take(message)

    def open(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """The peer's hello was accepted: frames may have ``max_bytes`` from now on."""
        self._gate.release(self)
        self._frames.max_bytes = max_bytes

    def refuse(self, reason: str) -> None:
        """Close the connection at once, with a line in the log."""
        self._gate.refuse(self, reason)

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def lost(self) -> None:
        """The connection has ended."""
        self._gate.release(self)
