"""One engine's connection to this front end: greeting, then steps and reports."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, cast

from trimaran.comm.errors import ProtocolError
from trimaran.comm.messages.guarded_frames import Gate, GuardedFrames
from trimaran.comm.messages.messages import (
    PROTOCOL_VERSION,
    EngineHello,
    FrontendHello,
    Message,
    Ping,
    Pong,
    encode_parts,
)

logger = logging.getLogger(__name__)

BEING_ENDED = "is being ended"
"""Why an engine is refused after the supervisor reported its incarnation as down."""


class LinkOwner(Protocol):
    """The receiver of a link's events: it decides which engine may serve."""

    def refusal(self, hello: EngineHello) -> str:
        """Why this engine cannot serve; empty if it can."""

    def link_ready(self, link: EngineLink, hello: EngineHello) -> None:
        """The engine greeted and was accepted."""

    def link_lost(self, link: EngineLink) -> None:
        """An accepted engine's connection ended."""

    def message(self, link: EngineLink, message: Message) -> None:
        """One message of an accepted engine.

        Raises:
            ProtocolError: an engine does not send this message, or it contradicts itself.
        """


class EngineLink(asyncio.Protocol):
    """Rank 0 of one group. Everything happens on the event loop."""

    def __init__(self, owner: LinkOwner, gate: Gate) -> None:
        self._owner = owner
        self._gate = gate
        self._transport: asyncio.Transport | None = None
        self._frames: GuardedFrames | None = None
        self._is_retired = False
        self._unsent: list[bytes | memoryview] = []
        """The messages of this round of the event loop."""
        self.hello: EngineHello | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A group dialled in; it must greet first."""
        # Not isinstance: uvloop's transports are classes of their own.
        self._transport = cast(asyncio.Transport, transport)
        self._frames = self._gate.admit(self._transport)

    def data_received(self, data: bytes) -> None:
        """Dispatch every complete message; a peer that breaks the protocol is dropped."""
        if self._is_retired or self._frames is None:
            return
        try:
            self._frames.feed(data, self._take)
        except ProtocolError as error:
            if self.hello is None:
                self._frames.refuse(str(error))
                return
            logger.error("dropping an engine's connection: %s", error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The group is gone, or this end closed."""
        self._transport = None
        if self._frames is not None:
            self._frames.lost()
        if not self._is_retired and self.hello is not None:
            self._owner.link_lost(self)

    def retire(self) -> None:
        """Report no further event to the owner."""
        self._is_retired = True

    def send(self, message: Message) -> None:
        """Queue a message; after the connection's end it is dropped.

        The messages of one round of the event loop leave together: a system call takes as
        long as encoding several messages, and each wakes the engine.
        """
        if self._transport is None:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._write)
        self._unsent += encode_parts(message)

    def close(self) -> None:
        """Close the connection once what is queued is sent."""
        self._write()
        if self._transport is not None:
            self._transport.close()

    def _write(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self._transport is not None and unsent:
            self._transport.writelines(unsent)

    def _take(self, message: Message) -> None:
        if self._is_retired:
            return
        if self.hello is not None:
            if isinstance(message, Ping):
                self.send(Pong(payload=message.payload))
            else:
                self._owner.message(self, message)
        elif isinstance(message, EngineHello):
            self._greet(message)
        else:
            raise ProtocolError(f"{type(message).__name__} came before EngineHello")

    def _greet(self, hello: EngineHello) -> None:
        assert self._frames is not None
        reason = self._refusal(hello)
        if reason:
            # A dying group dials again until it is ended: that is no error.
            level = logging.INFO if reason.endswith(BEING_ENDED) else logging.ERROR
            logger.log(level, "refused an engine for model '%s': %s", hello.model, reason)
            self.send(FrontendHello(accepted=False, reason=reason))
            self.close()
            return
        self._frames.open()
        self.send(FrontendHello())
        self.hello = hello
        self._owner.link_ready(self, hello)

    def _refusal(self, hello: EngineHello) -> str:
        if hello.protocol_version != PROTOCOL_VERSION:
            return (
                f"protocol version {hello.protocol_version}, but this front end speaks "
                f"{PROTOCOL_VERSION}: install the same version everywhere"
            )
        if not self._gate.accepts(hello.token):
            return "wrong token: the engine belongs to another run"
        return self._owner.refusal(hello)
