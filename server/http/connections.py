"""Connections of an HTTP port: bounds, deadlines, and requests that are no HTTP."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import resource
import socket
import sys
import termios
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from trimaran.server.access.config import ConnectionLimits
from trimaran.server.access.policy import Notice
from trimaran.server.http.messages import JSON, RETRY_AFTER_S, plain_error
from trimaran.server.protocol.generate import error_object

_LONGEST = 160
"""Characters of a line that a client may fill."""


class _ClientFaults(logging.Filter):
    """Logs the error of a malformed request as information, without the traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        client = record.args[0] if isinstance(record.args, tuple) and record.args else "?"
        reason = " ".join(str(error.message).split())[:_LONGEST]
        record.msg, record.args = "%s sent no valid HTTP request: %s", (client, reason)
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.INFO, "INFO"
        return fault_logger.isEnabledFor(logging.INFO)


fault_logger = logging.getLogger(__name__)
fault_logger.addFilter(_ClientFaults())


logger = logging.getLogger(__name__)

_MAX_KEPT = 256


class OpenFiles:
    """Keeps some descriptors free for engines, the metrics port and files.

    When descriptors run out, the system closes new connections silently, including those of
    engines and operators. Each check is O(1): a new descriptor has the lowest free number, so a
    high number means that all lower ones are in use.
    """

    def __init__(self) -> None:
        self._limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._kept = min(self._limit // 8, _MAX_KEPT)
        self._refused = Notice(logger, logging.WARNING)

    def refusal_of(self, descriptor: int) -> str | None:
        """Why a new connection is refused, or None."""
        if self._limit == resource.RLIM_INFINITY or descriptor < self._limit - self._kept:
            return None
        self._refused.note(
            "new HTTP connections were refused: %d files and connections are open, and the "
            "rest of the %d that a process may have is kept for engines and metrics. Raise the "
            "limit (ulimit -n, systemd's LimitNOFILE), or start more front ends "
            "(--frontend-processes).",
            descriptor,
            self._limit,
        )
        return "the server has too many open connections"


MAX_HEAD_LINE_BYTES = 64 << 10
"""Limit on a request line and on each header: authentication tokens may be long."""

MAX_NUM_HEADERS = 128
MAX_HEAD_BYTES = 256 << 10
"""Limit on a head that arrives in parts."""

_LONGEST_REASON = 200
_MIN_ROOM_INTERVAL_S = 1.0
_ROOM_PARTS = 16
_NEVER_S = 10 * 365 * 24 * 3600.0
_OPTIONS: dict[str, Any] = {
    "access_log": None,
    "auto_decompress": False,
    "logger": fault_logger,
    "max_line_size": MAX_HEAD_LINE_BYTES,
    "max_field_size": MAX_HEAD_LINE_BYTES,
    "max_headers": MAX_NUM_HEADERS,
}


class BodyTimeoutError(HttpProcessingError):
    """A body stalled: its request is answered and its connection closed."""

    def __init__(self, limits: ConnectionLimits) -> None:
        super().__init__(
            code=HTTPStatus.REQUEST_TIMEOUT,
            message=f"less than {limits.min_rate} bytes/s of the body arrived for "
            f"{limits.body_timeout_s:g} s (--http-body-timeout, --http-min-rate)",
        )


class HttpConnections(web.Server):
    """Accepts connections up to a limit; a request ends at once when its connection does."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        limits: ConnectionLimits,
        *,
        has_reserve: bool = False,
    ) -> None:
        """With ``has_reserve`` the descriptors that clients leave are for this port too."""
        super().__init__(handler, handler_cancellation=True)
        self.limits = limits
        self.late = Notice(logger, logging.INFO)
        self._open_files = None if has_reserve else OpenFiles()
        self._full = Notice(logger, logging.WARNING)
        self._room_made_at = float("-inf")

    def __call__(self) -> web.RequestHandler:
        """A new connection."""
        loop = asyncio.get_running_loop()
        # A connection without a request is closed by the library's own timer.
        idle_s = self.limits.idle_timeout_s or _NEVER_S
        return _Connection(self, loop=loop, keepalive_timeout=idle_s, **_OPTIONS)

    def refusal_of(self, descriptor: int) -> str | None:
        """Why a new connection is refused, or None."""
        limit = self.limits.max_connections
        if len(self._connections) > limit and not self._make_room():
            self._full.note("new HTTP connections were refused: %d are open, which is the "
                            "limit (--http-max-connections)", limit)  # fmt: skip
            return (
                f"the server has {limit} open connections, which is its limit "
                "(--http-max-connections). Try again later"
            )
        if self._open_files is None:
            return None
        return self._open_files.refusal_of(descriptor)

    def _make_room(self) -> bool:
        """Close connections that wait for a next request, those first that wait longest.

        Many at once and once a second: the search costs O(connections).
        """
        now = time.monotonic()
        if now - self._room_made_at < _MIN_ROOM_INTERVAL_S:
            return False
        self._room_made_at = now
        idle = [c for c in self._connections if isinstance(c, _Connection) and c.is_idle]
        idle.sort(key=lambda connection: connection.idle_until)
        for connection in idle[: max(1, self.limits.max_connections // _ROOM_PARTS)]:
            connection.force_close()
        return bool(idle)


class _Connection(web.RequestHandler):
    """A connection with deadlines that answers malformed HTTP like any invalid request.

    Each deadline is a timer that exists only while its state does: an honest request, whose
    head and body arrive at once, sets none.
    """

    __slots__ = (
        "_body_timer", "_connections", "_head_timer", "_last_body", "_num_body_bytes",
        "_num_head_bytes", "_num_unsent_bytes", "_own_transport", "_send_timer",
    )  # fmt: skip

    def __init__(self, connections: HttpConnections, **options: Any) -> None:
        super().__init__(connections, **options)
        self._connections = connections
        self._last_body: StreamReader | None = None
        """The body of the latest request."""
        self._own_transport: asyncio.Transport | None = None
        """The transport until its end: also when the connection is closed and not yet sent."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._num_body_bytes = 0
        self._num_unsent_bytes = 0

    @property
    def is_idle(self) -> bool:
        """Whether the connection has had a request and waits for the next."""
        return self._request_count > 0 and self._waiter is not None

    @property
    def idle_until(self) -> float:
        """When the connection is closed unless a request comes, in the loop's time."""
        return self._next_keepalive_close_time

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a connection, or answer why it is refused."""
        super().connection_made(transport)
        self._own_transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        reason = self._connections.refusal_of(sock.fileno())
        if reason is not None:
            self._answer_and_close(HTTPStatus.SERVICE_UNAVAILABLE, reason)
            return
        limits = self._connections.limits
        if limits.send_timeout_s:
            # Also after the connection is closed here, while the last answer is unsent.
            timeout_ms = int(1000 * limits.send_timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        self._start_head_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        """The connection is gone, and its deadlines with it."""
        for timer in (self._head_timer, self._body_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        self._own_transport = None
        # The body refers to this connection: both would stay until the collector comes, and a
        # body may be megabytes.
        self._last_body = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed received bytes; a body that breaks HTTP ends with that error."""
        num_known, is_body = self._request_count, self._has_open_body
        super().data_received(data)
        num_new = self._request_count - num_known
        if num_new:
            self._note_requests(num_new)
        elif is_body:
            self._num_body_bytes += len(data)
            if not self._has_open_body:
                self._stop_body_timer()
        elif data:
            self._note_part_of_head(len(data))

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Read on; a connection whose reading was not paused has nothing to parse again."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def pause_writing(self) -> None:
        """The client reads slower than its answer is made."""
        super().pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        """The client has read enough."""
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs it
        return refusal(status, message or "")

    # ---- heads ---------------------------------------------------------------------------

    def _note_requests(self, count: int) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._num_head_bytes = 0
        for index in range(-min(count, len(self._messages)), 0):
            message, body = self._messages[index]
            if isinstance(message, RawRequestMessage):
                self._last_body = body
            elif self._last_body is not None and not self._last_body.is_eof():
                # The error is queued behind the request, whose reader would wait for ever.
                self._last_body.set_exception(message.exc)
        self._stop_body_timer()
        if self._has_open_body:
            self._start_body_timer()

    def _note_part_of_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._head_timer is None:
            self._start_head_timer()
        if self._num_head_bytes > MAX_HEAD_BYTES and not self._request_in_progress:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._answer_and_close(status, f"the head has more than {MAX_HEAD_BYTES} bytes")

    def _start_head_timer(self) -> None:
        timeout_s = self._connections.limits.header_timeout_s
        if timeout_s:
            self._head_timer = self._loop.call_later(timeout_s, self._end_head)

    def _end_head(self) -> None:
        self._head_timer = None
        if self._request_in_progress or self._messages:
            # The head of a next request may wait for the answer to this one.
            self._start_head_timer()
            return
        timeout_s = self._connections.limits.header_timeout_s
        self._connections.late.note(
            "HTTP connections were closed: no whole head within %g s (--http-header-timeout)",
            timeout_s,
        )
        if self._num_head_bytes:
            text = f"the head took longer than {timeout_s:g} s (--http-header-timeout)"
            self._answer_and_close(HTTPStatus.REQUEST_TIMEOUT, text)
        else:
            self.force_close()

    # ---- bodies --------------------------------------------------------------------------

    @property
    def _has_open_body(self) -> bool:
        return self._last_body is not None and not self._last_body.is_eof()

    def _start_body_timer(self) -> None:
        timeout_s = self._connections.limits.body_timeout_s
        self._num_body_bytes = 0
        if timeout_s:
            self._body_timer = self._loop.call_later(timeout_s, self._end_body)

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _end_body(self) -> None:
        self._body_timer = None
        body, limits = self._last_body, self._connections.limits
        if body is None or body.is_eof() or self.transport is None:
            return
        # While this side does not read, the client cannot send.
        is_held = self._reading_paused or self._buffer_paused
        if is_held or self._num_body_bytes >= limits.min_rate * limits.body_timeout_s:
            self._start_body_timer()
            return
        self._connections.late.note(
            "HTTP connections were closed: their body stalled for %g s (--http-body-timeout)",
            limits.body_timeout_s,
        )
        if self._request_in_progress and body.exception() is None:
            body.set_exception(BodyTimeoutError(limits))
        else:
            self.force_close()

    # ---- answers -------------------------------------------------------------------------

    def _start_send_timer(self) -> None:
        timeout_s = self._connections.limits.send_timeout_s
        transport = self._own_transport
        if transport is not None and timeout_s:
            self._num_unsent_bytes = _num_unsent_bytes(transport)
            self._send_timer = self._loop.call_later(timeout_s, self._end_sending)

    def _end_sending(self) -> None:
        self._send_timer = None
        transport, limits = self._own_transport, self._connections.limits
        if transport is None:
            return
        # Writers wait: the buffer becomes smaller by what the client takes.
        num_sent = self._num_unsent_bytes - _num_unsent_bytes(transport)
        if num_sent >= limits.min_rate * limits.send_timeout_s:
            self._start_send_timer()
            return
        self._connections.late.note(
            "HTTP connections were closed: their clients took less than %d bytes/s of the "
            "answer for %g s (--http-send-timeout, --http-min-rate)",
            limits.min_rate, limits.send_timeout_s,
        )  # fmt: skip
        transport.abort()

    def _answer_and_close(self, status: HTTPStatus, text: str) -> None:
        """Answer whatever is asked, or will be, and close the connection behind that."""
        if self.transport is not None:
            self.transport.write(_unasked_answer(status, text))
            self.force_close()


def _num_unsent_bytes(transport: asyncio.Transport) -> int:
    """The bytes that the client's system has not confirmed, in this process and in the kernel.

    The kernel takes more only when a third of its buffer is free: long, for a slow client.
    """
    unconfirmed = fcntl.ioctl(transport.get_extra_info("socket"), termios.TIOCOUTQ, bytes(4))
    return transport.get_write_buffer_size() + int.from_bytes(unconfirmed, sys.byteorder)


def refusal(status: int, message: str) -> web.Response:
    """The last answer on a connection whose bytes are not HTTP."""
    reason = " ".join(message.split())[:_LONGEST_REASON]
    response = plain_error(status, reason or "the request is no valid HTTP")
    response.force_close()
    return response


def _unasked_answer(status: HTTPStatus, text: str) -> bytes:
    body = error_object(text)
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}", f"Content-Type: {JSON}",
        f"Content-Length: {len(body)}", "Connection: close",
    ]  # fmt: skip
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        lines.append(f"Retry-After: {RETRY_AFTER_S}")
    return "\r\n".join((*lines, "", "")).encode() + body
