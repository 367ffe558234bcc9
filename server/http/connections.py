"""Connections of the HTTP server: limits on heads and descriptors, and malformed requests."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from trimaran.server.http.messages import plain_error, unasked_refusal

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
_NOTICE_INTERVAL_S = 60.0


class OpenFiles:
    """Keeps some descriptors free for engines, the metrics port and files.

    When descriptors run out, the system closes new connections silently, including those of
    engines and operators. Each check is O(1): a new descriptor has the lowest free number, so a
    high number means that all lower ones are in use.
    """

    def __init__(self) -> None:
        self._limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._kept = min(self._limit // 8, _MAX_KEPT)
        self._noticed_at: float | None = None

    def refusal_of(self, descriptor: int) -> str | None:
        """Why a new connection is refused, or None; logged once a minute."""
        if self._limit == resource.RLIM_INFINITY or descriptor < self._limit - self._kept:
            return None
        now = time.monotonic()
        if self._noticed_at is None or now - self._noticed_at >= _NOTICE_INTERVAL_S:
            self._noticed_at = now
            logger.warning(
                "New HTTP connections are refused until others end: %d files and connections "
                "are open, and the rest of the %d that a process may have is kept for engines "
                "and metrics. Raise the limit (ulimit -n, systemd's LimitNOFILE), or start "
                "more front ends (--frontend-processes).",
                descriptor, self._limit,
            )  # fmt: skip
        return "the server has too many open connections"


MAX_HEAD_LINE_BYTES = 64 << 10
"""Limit on a request line and on each header: authentication tokens may be long."""

MAX_NUM_HEADERS = 128
_LONGEST_REASON = 200
_OPTIONS: dict[str, Any] = {
    "access_log": None,
    "auto_decompress": False,
    "logger": fault_logger,
    "max_line_size": MAX_HEAD_LINE_BYTES,
    "max_field_size": MAX_HEAD_LINE_BYTES,
    "max_headers": MAX_NUM_HEADERS,
}


class HttpConnections(web.Server):
    """Accepts connections; a request ends at once when its connection does."""

    def __init__(
        self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
    ) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._open_files = OpenFiles()

    def __call__(self) -> web.RequestHandler:
        """A new connection."""
        loop = asyncio.get_running_loop()
        return _Connection(self, self._open_files, loop=loop, **_OPTIONS)


class _Connection(web.RequestHandler):
    """A connection that answers malformed HTTP like any invalid request."""

    __slots__ = ("_last_body", "_open_files")

    def __init__(self, manager: web.Server, open_files: OpenFiles, **options: Any) -> None:
        super().__init__(manager, **options)
        self._open_files = open_files
        self._last_body: StreamReader | None = None
        """The body of the latest request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a connection, or answer why it is refused."""
        super().connection_made(transport)
        reason = self._open_files.refusal_of(transport.get_extra_info("socket").fileno())
        if reason is not None and self.transport is not None:
            self.transport.write(unasked_refusal(reason))
            self.force_close()

    def data_received(self, data: bytes) -> None:
        """Feed received bytes; a body that breaks HTTP ends with that error."""
        num_known = self._request_count
        super().data_received(data)
        for index in range(num_known - self._request_count, 0):
            message, body = self._messages[index]
            if isinstance(message, RawRequestMessage):
                self._last_body = body
            elif self._last_body is not None and not self._last_body.is_eof():
                # The error is queued behind the request, whose reader would wait for ever.
                self._last_body.set_exception(message.exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs it
        return refusal(status, message or "")


def refusal(status: int, message: str) -> web.Response:
    """The last answer on a connection whose bytes are not HTTP."""
    reason = " ".join(message.split())[:_LONGEST_REASON]
    response = plain_error(status, reason or "the request is no valid HTTP")
    response.force_close()
    return response
