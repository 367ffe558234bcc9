"""HTTP bodies in and out: size limits, compression, JSON answers, errors and events."""

from __future__ import annotations

import gzip
import time
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from email.utils import formatdate
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http import SERVER_SOFTWARE

from trimaran.comm.errors import EngineDeadError, ErrorKind, RequestError
from trimaran.server.decoding.body import SHORT_BYTES, Body, BodyBuilder, view_of
from trimaran.server.decoding.pending import BodyMemory
from trimaran.server.inference.cooperative import in_turn
from trimaran.server.inference.registry import NotReadyError
from trimaran.server.inference.tensor_bytes import Buffer
from trimaran.server.protocol import json_access
from trimaran.server.protocol.generate import error_object
from trimaran.server.protocol.infer_json import json_too_large
from trimaran.server.protocol.infer_response import sum_of_lengths
from trimaran.server.protocol.tensor_json import BodyPart, LongValues

_AUTODETECT_BITS = zlib.MAX_WBITS | 32
_CODED_BYTES, _DECODED_BYTES = 64 << 10, 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_KNOWN = ("identity", "deflate", "gzip")


class UnsupportedCodingError(RequestError):
    """A request's Content-Encoding is not supported."""

    def __init__(self) -> None:
        super().__init__("Unsupported compression type", ErrorKind.UNSUPPORTED)


def decompress(body: Body, coding: str, max_bytes: int) -> Body:
    """The decoded body of a request.

    Raises:
        UnsupportedCodingError: neither gzip, deflate nor identity.
        RequestError: undecodable, cut, in several parts, or decoded over ``max_bytes``.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in ("gzip", "deflate"):
        raise UnsupportedCodingError
    decoder = zlib.decompressobj(_AUTODETECT_BITS)
    decoded, view, start = BodyBuilder(), view_of(body), 0
    while start < len(view) and not decoder.eof:
        data: Buffer = view[start : start + _CODED_BYTES]
        start += len(data)
        while data and not decoder.eof:
            decoded.append(_decompressed(decoder, data))
            data = decoder.unconsumed_tail
            if decoded.num_bytes > max_bytes:
                raise RequestError(
                    f"Decompressed data size exceeds the maximum allowed value of {max_bytes} "
                    "bytes. Use --http-max-input-size to increase the limit."
                )
    if not decoder.eof:
        raise RequestError("failed to decompress the request: the data ends too early")
    rest = decoder.unused_data + bytes(view[start : start + len(_GZIP_MAGIC)])
    if rest.startswith(_GZIP_MAGIC):
        raise RequestError(
            "failed to decompress the request: it is several gzip streams one after the other. "
            "Compress it as one."
        )
    return decoded.finish()


def _decompressed(decoder: Any, data: Buffer) -> bytes:
    try:
        part: bytes = decoder.decompress(data, _DECODED_BYTES)
    except zlib.error as error:
        raise RequestError(f"failed to decompress the request: {error}") from None
    return part


def best_coding(accept_encoding: str) -> str:
    """The coding of a response to a request that accepts these; identity if none is
    supported.
    """
    best, best_weight = "identity", 0.0
    for item in accept_encoding.split(","):
        name, _, weight_text = item.partition(";")
        name = name.strip().lower()
        if name not in _KNOWN:
            continue
        weight = _weight(weight_text)
        if weight > best_weight:
            best, best_weight = name, weight
    return best


def _weight(text: str) -> float:
    key, _, value = text.partition("=")
    if key.strip().lower() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


def compress(body: bytes, coding: str) -> bytes:
    """Encode a response's body by a coding that `best_coding` chose."""
    if coding == "gzip":
        return gzip.compress(body, compresslevel=6, mtime=0)
    return zlib.compress(body) if coding == "deflate" else body


JSON = "application/json"
LONG_ANSWER_BYTES = 128 << 10
"""A longer answer is written while its request still counts as running: a drain waits for it.
"""

RETRY_AFTER_S = "2"
"""Retry-After of requests to a dead worker group, in seconds."""


async def read_body(request: web.BaseRequest, max_bytes: int, memory: BodyMemory) -> Body:
    """The whole body, whose memory is counted in ``share``.

    A longer body is refused as soon as its size is known. The connection discards the rest, so
    that clients which write before they read see the answer.

    Raises:
        RequestError: longer than ``max_bytes``, or there is no room for it.
    """
    announced = request.content_length
    if announced is not None and announced > max_bytes:
        raise json_too_large(announced, max_bytes)
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    content = request.content
    if content.is_eof() and announced is not None and announced <= SHORT_BYTES:
        # It came with its head, as those of most requests.
        whole = content.read_nowait()
        memory.add(len(whole))
        return whole
    body = BodyBuilder()
    while part := await request.content.readany():
        num_bytes = body.num_bytes + len(part)
        if num_bytes > max_bytes:
            raise json_too_large(num_bytes, max_bytes)
        memory.add(len(part))
        body.append(part)
    return body.finish()


SMALL_BODY_BYTES = 64 << 10
"""Limit on the bodies of routes that take a few names and settings."""


async def read_small_body(request: web.BaseRequest) -> bytes:
    """The body of a route that takes a few names and settings.

    Raises:
        RequestError: longer than `SMALL_BODY_BYTES`.
    """
    announced, parts, num_bytes = request.content_length, [], 0
    if announced is not None and announced > SMALL_BODY_BYTES:
        raise _not_small(announced)
    while part := await request.content.readany():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > SMALL_BODY_BYTES:
            raise _not_small(num_bytes)
    return b"".join(parts)


def _not_small(num_bytes: int) -> RequestError:
    return RequestError(
        f"the request's body has {num_bytes} bytes, and this route takes at most "
        f"{SMALL_BODY_BYTES}. Send only the names and settings that it knows."
    )


class _SentResponse(web.StreamResponse):
    """An answer that is on its way already. Stateless: one object stands for all."""

    def __init__(self) -> None:
        super().__init__()
        self._eof_sent = True
        self._keep_alive = True


_SENT = _SentResponse()
_SECOND_HEADS: tuple[int, bytes] = (0, b"")


def _tail_of_head() -> bytes:
    """The headers of this second, with the end of the head."""
    global _SECOND_HEADS
    now = int(time.time())
    if _SECOND_HEADS[0] != now:
        text = f"Date: {formatdate(now, usegmt=True)}\r\nServer: {SERVER_SOFTWARE}\r\n\r\n"
        _SECOND_HEADS = now, text.encode()
    return _SECOND_HEADS[1]


_JSON_HEAD = f"HTTP/1.1 200 OK\r\nContent-Type: {JSON}\r\nContent-Length: %d\r\n".encode()


async def send_json(
    request: web.BaseRequest, body: bytes, *, is_last: bool = False
) -> web.StreamResponse:
    """Answer a request successfully with a short JSON text; the same bytes as aiohttp's, whose
    objects take longer than the write. With ``is_last`` the connection is closed afterwards.

    Raises:
        ConnectionError: the client is gone.
    """
    if is_last or not request.keep_alive or request.version != HttpVersion11:
        response = web.Response(body=body, content_type=JSON)
        if is_last:
            response.force_close()
        return response
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client is gone")
    transport.write(b"".join((_JSON_HEAD % len(body), _tail_of_head(), body)))
    if request.protocol.writing_paused:
        await request.writer.drain()
    return _SENT


async def write_parts(
    request: web.BaseRequest,
    parts: deque[BodyPart],
    headers: Mapping[str, str],
    *,
    is_last: bool,
) -> web.StreamResponse:
    """Send a long body; returns once the client has read all but the socket buffers.

    Written parts are freed, without a copy of the whole body. Long values become a text as the
    client reads, in chunks without a length in front. With ``is_last`` the connection is closed
    afterwards.
    """
    stream = web.StreamResponse(headers=headers)
    stream.content_length = sum_of_lengths(parts)
    if is_last:
        stream.force_close()
    await stream.prepare(request)
    while parts:
        part = parts.popleft()
        if isinstance(part, LongValues):
            await _write_values(stream, part)
        else:
            await stream.write(part)
    await stream.write_eof()
    return stream


_PIECE_BYTES = 32 << 10
"""A piece of a text that is written as it is made: less than two milliseconds of work."""


async def _write_values(stream: web.StreamResponse, values: LongValues) -> None:
    texts = values.texts()

    def piece() -> bytes:
        found, num_bytes = [], 0
        for text in texts:
            found.append(text)
            num_bytes += len(text)
            if num_bytes >= _PIECE_BYTES:
                break
        return b"".join(found)

    while text := await in_turn(piece):
        await stream.write(text)


async def send_document(
    request: web.BaseRequest, document: bytes, *, is_last: bool
) -> web.StreamResponse:
    """Answer with a JSON text of any length, from within the context in which the request
    counts as running.

    Raises:
        ConnectionError: the client is gone.
    """
    if len(document) <= LONG_ANSWER_BYTES:
        return await send_json(request, document, is_last=is_last)
    parts: deque[BodyPart] = deque((document,))
    headers = {"Content-Type": JSON}
    return await write_parts(request, parts, headers, is_last=is_last)


def json_response(value: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    """A successful answer."""
    return web.Response(body=json_access.dump(value), content_type=JSON, headers=headers)


def error_response(error: RequestError) -> web.Response:
    """The answer to a request that failed before anything was sent."""
    response = plain_error(error.kind.http_status, str(error))
    response.headers.update(retry_header(error))
    if isinstance(error, UnsupportedCodingError):
        response.headers["Accept-Encoding"] = "gzip, deflate"
    return response


def retry_header(error: RequestError) -> dict[str, str]:
    """The header of an error after which the client may repeat the request."""
    may_repeat = isinstance(error, (NotReadyError, EngineDeadError))
    return {"Retry-After": RETRY_AFTER_S} if may_repeat else {}


def plain_error(status: int, text: str) -> web.Response:
    """The answer of an error that is no `RequestError`."""
    return web.Response(status=status, body=error_object(text), content_type=JSON)


class EventWriter:
    """Writes server-sent events of a prepared stream. Writing waits only while the client's
    window is full.
    """

    def __init__(self, request: web.BaseRequest, stream: web.StreamResponse) -> None:
        self._request = request
        self._stream = stream
        self._is_begun = False
        """Whether the head has been sent, with the first event."""

    def write_at_once(self, event: bytes) -> bool:
        """Write an event if nothing has to be waited for; else False: `write` it.

        The same bytes as aiohttp's writer, whose two coroutines take longer than the write.
        """
        request = self._request
        transport = request.transport
        if (
            not self._is_begun
            or transport is None
            or transport.is_closing()
            or request.protocol.writing_paused
            or not self._stream.chunked
        ):
            return False
        transport.write(b"%x\r\ndata: %b\n\n\r\n" % (len(event) + len(b"data: \n\n"), event))
        return True

    async def write(self, event: bytes) -> None:
        """Write an event, and wait until the client's window has room for the next.

        Raises:
            ConnectionError: the client is gone.
        """
        await self.write_together((event,))

    async def write_together(self, events: Iterable[bytes]) -> None:
        """Write events in one part of the stream, as `write` does.

        Raises:
            ConnectionError: the client is gone.
        """
        await self._stream.write(b"".join([b"data: %b\n\n" % event for event in events]))
        self._is_begun = True
        await self._request.writer.drain()
