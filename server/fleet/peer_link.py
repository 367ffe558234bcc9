"""The connection between two front ends of one server, and the state that they share."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from trimaran.comm.errors import ErrorKind, ProtocolError, RequestError
from trimaran.comm.messages.messages import Answer, Ask, FrameBuffer, Message, encode
from trimaran.server.inference.registry import StateOfVersion

logger = logging.getLogger(__name__)

Verb: TypeAlias = Callable[["PeerLink", Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Answers one kind of question."""


class PeerLink(asyncio.Protocol):
    """One end of a link. Questions are begun in the order of arrival and may be answered in
    another order. Everything happens on the event loop.
    """

    def __init__(self, verbs: Mapping[str, Verb], on_lost: Callable[[PeerLink], None]) -> None:
        self._verbs = verbs
        self._on_lost = on_lost
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.index = -1
        """The index of the other front end, once it has greeted."""

    async def ask(
        self, verb: str, timeout_s: float | None = None, **arguments: Any
    ) -> Mapping[str, Any]:
        """The other end's answer.

        Raises:
            RequestError: the error raised at the other end; or UNAVAILABLE if the connection is
            lost, or if no answer arrives within ``timeout_s``.
        """
        ask_id = next(self._ids)
        future: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[ask_id] = future
        try:
            self._send(Ask(ask_id=ask_id, verb=verb, arguments=arguments))
            # Not `wait_for`: before Python 3.12 a cancellation is lost if the answer has
            # arrived.
            answered, _ = await asyncio.wait((future,), timeout=timeout_s)
        finally:
            self._waiting.pop(ask_id, None)
        if not answered:
            text = f"another front end did not answer {verb} within {timeout_s:g} s"
            raise RequestError(text, ErrorKind.UNAVAILABLE)
        return future.result()

    def close(self) -> None:
        """End the connection without calling the loss callback."""
        self._on_lost = _ignore
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Dispatch complete messages; a peer that breaks the protocol is dropped."""
        try:
            for message in self._frames.feed(data):
                self._take(message)
        except ProtocolError as error:
            logger.error("dropping another front end's connection: %s", error)
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is lost: every pending question fails."""
        self._transport = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_gone())
        for task in self._tasks:
            task.cancel()
        self._on_lost(self)

    def _send(self, message: Message) -> None:
        if self._transport is None:
            raise _gone()
        self._transport.write(encode(message))

    def _take(self, message: Message) -> None:
        if isinstance(message, Answer):
            self._take_answer(message)
        elif isinstance(message, Ask):
            task = asyncio.ensure_future(self._answer(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            raise ProtocolError(f"{type(message).__name__} is no message between front ends")

    def _take_answer(self, answer: Answer) -> None:
        future = self._waiting.get(answer.ask_id)
        if future is None or future.done():
            return
        if answer.error:
            future.set_exception(RequestError(answer.error, ErrorKind[answer.kind]))
        else:
            future.set_result(answer.values)

    async def _answer(self, ask: Ask) -> None:
        answer = Answer(ask_id=ask.ask_id)
        try:
            answer.values = dict(await self._verbs[ask.verb](self, ask.arguments))
        except RequestError as error:
            answer.error, answer.kind = str(error), error.kind.name
        except Exception as error:
            logger.exception("another front end asked for %s, which failed", ask.verb)
            answer.error = f"{ask.verb} failed: {type(error).__name__}: {error}"
            answer.kind = ErrorKind.INTERNAL.name
        if self._transport is not None:
            self._send(answer)


def _gone() -> RequestError:
    return RequestError(
        "the front end that decides what is served is being started again; try again in some "
        "seconds",
        ErrorKind.UNAVAILABLE,
    )


def _ignore(link: PeerLink) -> None:
    """The default listener does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedState:
    """The state that the first front end sends to followers."""

    saved_state: bytes = b""
    """`SavedState`, the loaded models."""

    states: tuple[StateOfVersion, ...] = ()
    """Every version that is not ready or no longer served."""

    log_settings: Mapping[str, Any] = field(default_factory=dict)
    trace_settings: Mapping[str, Any] = field(default_factory=dict)
    """Changed trace settings, by model."""

    regions: tuple[Mapping[str, Any], ...] = ()
    """Memory of clients: `RegionSpec` as plain values."""

    def to_wire(self) -> dict[str, Any]:
        """Plain values, for msgpack."""
        states = [each.to_wire() for each in self.states]
        return {
            "saved_state": self.saved_state,
            "states": states,
            "log_settings": dict(self.log_settings),
            "trace_settings": dict(self.trace_settings),
            "regions": list(self.regions),
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> SharedState:
        """The inverse of `to_wire`."""
        return cls(
            saved_state=wire["saved_state"],
            states=tuple(map(StateOfVersion.from_wire, wire["states"])),
            log_settings=wire["log_settings"],
            trace_settings=wire["trace_settings"],
            regions=tuple(wire["regions"]),
        )
