"""The connections of the HTTP server: how long heads may be, and what follows bad ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from trimaran.server.http import faults as http_faults
from trimaran.server.http.messages import plain_error, unasked_refusal
from trimaran.server.http.open_files import OpenFiles

MAX_HEAD_LINE_BYTES = 64 << 10
"""Limit on a request line and on each header: tokens that sign users in may be long."""

MAX_NUM_HEADERS = 128
_LONGEST_REASON = 200
_OPTIONS: dict[str, Any] = {
    "access_log": None,
    "auto_decompress": False,
    "logger": http_faults.logger,
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
    """A connection that answers what is no HTTP as it answers any wrong request."""

    __slots__ = ("_last_body", "_open_files")

    def __init__(self, manager: web.Server, open_files: OpenFiles, **options: Any) -> None:
        super().__init__(manager, **options)
        self._open_files = open_files
        self._last_body: StreamReader | None = None
        """Of the youngest request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection, or say why it cannot stay."""
        super().connection_made(transport)
        reason = self._open_files.refusal_of(transport.get_extra_info("socket").fileno())
        if reason is not None and self.transport is not None:
            self.transport.write(unasked_refusal(reason))
            self.force_close()

    def data_received(self, data: bytes) -> None:
        """Take what has come; a body that goes on as no HTTP ends with that error."""
        num_known = self._request_count
        super().data_received(data)
        for index in range(num_known - self._request_count, 0):
            message, body = self._messages[index]
            if isinstance(message, RawRequestMessage):
                self._last_body = body
            elif self._last_body is not None and not self._last_body.is_eof():
                # The error waits behind the request, whose reader would wait for ever.
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
    """The last answer on a connection: what came is no HTTP."""
    reason = " ".join(message.split())[:_LONGEST_REASON]
    response = plain_error(status, reason or "the request is no valid HTTP")
    response.force_close()
    return response
