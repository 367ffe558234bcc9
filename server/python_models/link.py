"""A model process's connection to its front end: batches and results in, responses out."""

from __future__ import annotations

import itertools
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextvars import ContextVar
from weakref import WeakValueDictionary

from trimaran.comm.errors import ErrorKind
from trimaran.comm.messages.bulk import BulkSender
from trimaran.server.python_models.responses import Ticket
from trimaran.server.python_models.wire import (
    NULL_KEY,
    Call,
    CancelCall,
    CancelRequests,
    Execute,
    Finish,
    FrameBuffer,
    Message,
    Question,
    Release,
    RequestFields,
    Respond,
    Result,
    encode,
    open_tensors,
    released,
)

_RECEIVE_BYTES = 1 << 18
_ORPHAN_EXIT_CODE = 1
_CANCELLED = "the request was cancelled"


def _end_process() -> None:
    os._exit(_ORPHAN_EXIT_CODE)


class Scope:
    """The requests of one call of ``execute``, and the calls made on their behalf."""

    def __init__(self, keys: Iterable[int]) -> None:
        self._left = set(keys)
        self.calls: set[int] = set()

    def cancel(self, key: int) -> None:
        """Mark a request as cancelled."""
        self._left.discard(key)

    @property
    def is_cancelled(self) -> bool:
        """Whether all requests of the scope are cancelled."""
        return not self._left


current_scope: ContextVar[Scope | None] = ContextVar("current_scope", default=None)
"""The scope of the running code; the model's own threads have none."""


class PendingCall:
    """A call of another model; its results come in order. Thread safe."""

    def __init__(self, number: int, scope: Scope | None) -> None:
        self.number = number
        self.scope = scope
        self._lock = threading.Lock()
        self._results: deque[Result] = deque()
        self._waiters: deque[Future[Result]] = deque()

    def put(self, result: Result) -> None:
        """Deliver a result."""
        with self._lock:
            while self._waiters:
                waiter = self._waiters.popleft()
                if waiter.set_running_or_notify_cancel():
                    waiter.set_result(result)
                    return
            self._results.append(result)

    def get(self) -> Future[Result]:
        """Wait for the next result."""
        future: Future[Result] = Future()
        with self._lock:
            if self._results:
                future.set_result(self._results.popleft())
            else:
                self._waiters.append(future)
        return future


class Link:
    """The open connection. Any thread may send; a separate thread reads.

    When the front end is gone, the process ends at once.
    """

    def __init__(self, sock: socket.socket, on_lost: Callable[[], None] = _end_process) -> None:
        """``on_lost`` is called by the reading thread, which ends then."""
        self._sock = sock
        self._on_lost = on_lost
        self._frames = FrameBuffer()
        # Reentrant: a garbage-collected request may send a message wherever memory is freed.
        self._send_lock = threading.RLock()
        self._bulk = BulkSender()
        self._bulk_lock = threading.RLock()
        self._calls: dict[int, PendingCall] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._scopes: dict[int, Scope] = {}
        self._tickets: WeakValueDictionary[int, Ticket] = WeakValueDictionary()
        # Requests that are in the inbox, and whether they were cancelled there.
        self._arriving: dict[int, bool] = {}
        self.inbox: queue.SimpleQueue[Execute | None] = queue.SimpleQueue()
        """Batches to execute; None at the end."""

    def receive_first(self) -> list[Message]:
        """Block until the first messages are there. Before `start`."""
        messages: list[Message] = []
        while not messages:
            data = self._receive()
            if not data:
                self._on_lost()
            messages = self._frames.feed(data)
        return messages

    def start(self, early: Iterable[Message]) -> None:
        """Read messages from now on; ``early`` ones come first."""
        for message in early:
            self._take(message)
        threading.Thread(target=self._read, name="front-end", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            MessageTooLongError: its tensors are too large.
        """
        with self._bulk_lock:
            frame = encode(message, self._bulk)
        with self._send_lock:
            try:
                self._sock.sendall(frame)
            except OSError:
                # The reading thread detects the same loss and ends the process.
                return

    def call(self, fields: RequestFields, *, is_decoupled: bool) -> PendingCall:
        """Have the front end run another model."""
        pending = self._new_call(current_scope.get())
        if pending.scope is not None and pending.scope.is_cancelled:
            self._forget(pending.number)
            kind = ErrorKind.CANCELLED.name
            pending.put(Result(call=pending.number, error=_CANCELLED, kind=kind))
            return pending
        try:
            request = fields.to_wire()
            self.send(Call(call=pending.number, request=request, is_decoupled=is_decoupled))
        except BaseException:
            self._forget(pending.number)
            raise
        if pending.scope is not None and pending.scope.is_cancelled:
            # Cancelled meanwhile: the first cancel message may have been sent before the call.
            self.cancel_call(pending)
        return pending

    def ask(self, verb: str, **arguments: object) -> Result:
        """The front end's answer to a question; blocks."""
        pending = self._new_call(None)
        self.send(Question(call=pending.number, verb=verb, arguments=arguments))
        return pending.get().result()

    def cancel_call(self, pending: PendingCall) -> None:
        """Cancel a call; ignored if the call has ended."""
        with self._lock:
            is_running = pending.number in self._calls
        if is_running:
            self.send(CancelCall(call=pending.number))

    def open_scope(self, tickets: Iterable[Ticket]) -> Scope:
        """The scope of new requests."""
        found = {ticket.key: ticket for ticket in tickets}
        scope = Scope(found)
        with self._lock:
            self._scopes.update(dict.fromkeys(found, scope))
            self._tickets.update(found)
            early = [key for key in found if self._arriving.pop(key, False)]
        self._cancel(early)
        return scope

    def forget(self, key: int) -> None:
        """A request is executed again: its next execution has a scope of its own."""
        with self._lock:
            self._scopes.pop(key, None)

    def respond(self, message: Respond) -> None:
        """Send a response; an ended request is forgotten. Responses of null requests are
        dropped.

        Raises:
            MessageTooLongError: its tensors are too large.
        """
        if message.key == NULL_KEY:
            return
        self.send(message)
        if message.is_final:
            with self._lock:
                self._scopes.pop(message.key, None)

    # ---- reading ------------------------------------------------------------------------

    def _read(self) -> None:
        while data := self._receive():
            for message in self._frames.feed(data):
                self._take(message)
        self._on_lost()

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(_RECEIVE_BYTES)
        except OSError:
            return b""

    def _take(self, message: Message) -> None:
        release = open_tensors(message)
        if release is not None:
            self.send(release)
        if isinstance(message, Execute):
            with self._lock:
                keys = [request["key"] for request in message.requests]
                self._arriving.update((key, False) for key in keys if key != NULL_KEY)
            self.inbox.put(message)
        elif isinstance(message, Release):
            with self._bulk_lock:
                released(message, self._bulk)
        elif isinstance(message, Result):
            self._take_result(message)
        elif isinstance(message, CancelRequests):
            self._cancel(message.keys)
        elif isinstance(message, Finish):
            self.inbox.put(None)

    def _take_result(self, result: Result) -> None:
        with self._lock:
            pending = self._calls.get(result.call)
        if result.is_final:
            self._forget(result.call)
        if pending is not None:
            pending.put(result)

    def _cancel(self, keys: Iterable[int]) -> None:
        calls: list[int] = []
        with self._lock:
            for key in keys:
                if key in self._arriving:
                    self._arriving[key] = True
                    continue
                ticket, scope = self._tickets.get(key), self._scopes.pop(key, None)
                if ticket is not None:
                    ticket.is_cancelled = True
                if scope is not None:
                    scope.cancel(key)
                    calls += scope.calls if scope.is_cancelled else ()
        for number in calls:
            self.send(CancelCall(call=number))

    # ---- calls --------------------------------------------------------------------------

    def _new_call(self, scope: Scope | None) -> PendingCall:
        with self._lock:
            pending = PendingCall(next(self._numbers), scope)
            self._calls[pending.number] = pending
            if scope is not None:
                scope.calls.add(pending.number)
        return pending

    def _forget(self, number: int) -> None:
        with self._lock:
            pending = self._calls.pop(number, None)
            if pending is not None and pending.scope is not None:
                pending.scope.calls.discard(number)


_link: Link | None = None


def set_link(link: Link) -> None:
    """Set the connection that the model's code uses."""
    global _link
    _link = link


def the_link() -> Link:
    """This process's connection."""
    assert _link is not None, "outside of a model process"
    return _link
