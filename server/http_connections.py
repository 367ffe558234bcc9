"""The connections of the HTTP server: how long heads may be, and what follows bad ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from trimaran.server import http_faults
from trimaran.server.http_messages import plain_error

MAX_HEAD_LINE_BYTES = 64 << 10
"""Limit on a request line and on each header: tokens that sign users in may be long."""

_LONGEST_REASON = 200
_OPTIONS: dict[str, Any] = {
    "access_log": None,
    "auto_decompress": False,
    "logger": http_faults.logger,
    "max_line_size": MAX_HEAD_LINE_BYTES,
    "max_field_size": MAX_HEAD_LINE_BYTES,
}


class HttpConnections(web.Server):
    """Accepts connections; a request ends at once when its connection does."""

    def __init__(
        self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
    ) -> None:
        super().__init__(handler, handler_cancellation=True)

    def __call__(self) -> web.RequestHandler:
        """A new connection."""
        return _Connection(self, loop=asyncio.get_running_loop(), **_OPTIONS)


class _Connection(web.RequestHandler):
    """A connection that answers what is no HTTP as it answers any wrong request."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs it
        reason = " ".join((message or "").split())[:_LONGEST_REASON]
        response = plain_error(status, reason or "the request is no valid HTTP")
        response.force_close()
        return response
