"""HTTP bodies in and out: reading within limits, JSON answers and errors."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from trimaran.comm.errors import EngineDeadError, RequestError
from trimaran.server.http.compression import UnsupportedCodingError
from trimaran.server.inference.registry import NotReadyError
from trimaran.server.protocol import json_access
from trimaran.server.protocol.generate import error_object
from trimaran.server.protocol.infer_json import json_too_large

JSON = "application/json"
MAX_BODY_BYTES = (1 << 31) - 1
"""Limit on a whole body, blobs included; gRPC messages have the same."""

LONG_ANSWER_BYTES = 128 << 10
"""A longer one is written while its request still counts as running: a drain awaits that."""

RETRY_AFTER_S = "2"
"""What clients of a dead worker group are told to wait."""


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytes:
    """The whole body.

    A longer one is refused as soon as that is known: what still arrives is thrown away by
    the connection, so that clients which write before they read see the answer.

    Raises:
        RequestError: longer than ``max_bytes``.
    """
    announced = request.content_length
    if announced is not None and announced > max_bytes:
        raise json_too_large(announced, max_bytes)
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    chunks: list[bytes] = []
    num_bytes = 0
    while chunk := await request.content.readany():
        chunks.append(chunk)
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise json_too_large(num_bytes, max_bytes)
    return b"".join(chunks)


async def write_parts(
    request: web.BaseRequest, parts: deque[bytes], headers: Mapping[str, str], *, is_last: bool
) -> web.StreamResponse:
    """Send a long body; returns once the client has taken it, but for what sockets hold.

    There is no copy of the whole: what is written is let go of. With ``is_last`` the
    connection is closed behind it.
    """
    stream = web.StreamResponse(headers=headers)
    stream.content_length = sum(map(len, parts))
    if is_last:
        stream.force_close()
    await stream.prepare(request)
    while parts:
        await stream.write(parts.popleft())
    await stream.write_eof()
    return stream


def json_response(value: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    """A successful answer."""
    return web.Response(body=json_access.dump(value), content_type=JSON, headers=headers)


def error_response(error: RequestError) -> web.Response:
    """The answer to a request that failed before anything was sent."""
    response = plain_error(error.kind.http_status, str(error))
    if isinstance(error, (NotReadyError, EngineDeadError)):
        response.headers["Retry-After"] = RETRY_AFTER_S
    if isinstance(error, UnsupportedCodingError):
        response.headers["Accept-Encoding"] = "gzip, deflate"
    return response


def plain_error(status: int, text: str) -> web.Response:
    """An error that is no request's fault."""
    return web.Response(status=status, body=error_object(text), content_type=JSON)


def unasked_refusal(text: str) -> bytes:
    """An answer to whatever will be asked on a connection that is closed behind it."""
    body = error_object(text)
    lines = (
        "HTTP/1.1 503 Service Unavailable", f"Content-Type: {JSON}",
        f"Content-Length: {len(body)}", f"Retry-After: {RETRY_AFTER_S}", "Connection: close",
    )  # fmt: skip
    return "\r\n".join((*lines, "", "")).encode() + body
