"""``POST .../infer``."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from functools import partial

from aiohttp import web

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.http.body_reader import LONG_BYTES, BodyReader
from trimaran.server.http.messages import (
    JSON,
    LONG_ANSWER_BYTES,
    MAX_BODY_BYTES,
    best_coding,
    compress,
    decompress,
    read_body,
    write_parts,
)
from trimaran.server.http.routes import Route
from trimaran.server.inference.cooperative import run_cooperatively
from trimaran.server.inference.request import Model
from trimaran.server.protocol.infer_json import ParsedInfer, header_length, parse_infer
from trimaran.server.protocol.infer_response import EncodedInfer, encode_infer
from trimaran.server.service import Service

# Decoding that takes longer than a few milliseconds runs in a thread.
_SHORT_CODED_BYTES = 4 << 10

LENGTH_HEADER = "Inference-Header-Content-Length"
DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"


async def infer(
    service: Service, bodies: BodyReader, request: web.BaseRequest, route: Route
) -> web.StreamResponse:
    """Answer one inference request.

    Raises:
        RequestError: the request failed.
    """
    service.admission.check()
    model = service.registry.get_ready(route.name, route.version)
    if model.is_decoupled:
        raise RequestError(DECOUPLED, ErrorKind.UNSUPPORTED)
    body = await _read(service, request)
    with service.admission.admit():
        with service.admission.unless_given_up():
            model, parsed = await _parsed(service, bodies, request, route, body)
            response = await service.infer_once(
                model, parsed.request, parsed.inputs, parsed.outputs
            )
            encoded = await run_cooperatively(encode_infer(response, parsed))
            headers, parts = await _coded(request, encoded)
        if encoded.num_bytes > LONG_ANSWER_BYTES:
            is_last = service.admission.is_draining
            return await write_parts(request, parts, headers, is_last=is_last)
    return web.Response(body=b"".join(parts), headers=headers)


async def _read(service: Service, request: web.BaseRequest) -> bytes:
    """The decompressed body."""
    # Blobs after the JSON are not under the input limit.
    has_blobs = LENGTH_HEADER in request.headers
    limit = MAX_BODY_BYTES if has_blobs else service.config.http_max_input_bytes
    body = await read_body(request, limit)
    coding = request.headers.get("Content-Encoding", "")
    if coding and len(body) > _SHORT_CODED_BYTES:
        return await asyncio.to_thread(decompress, body, coding, limit)
    return decompress(body, coding, limit)


async def _parsed(
    service: Service, bodies: BodyReader, request: web.BaseRequest, route: Route, body: bytes
) -> tuple[Model, ParsedInfer]:
    arrival_ns = time.monotonic_ns()
    # The model may have been replaced while the body arrived.
    ready = partial(service.registry.get_ready, route.name, route.version)
    model = ready()
    limit = service.config.http_max_input_bytes
    json_bytes = header_length(request.headers.get(LENGTH_HEADER), len(body))
    if LONG_BYTES < json_bytes <= limit:
        model, parsed = await bodies.read_infer(body, json_bytes, ready)
    else:
        parsed = parse_infer(body, json_bytes, model.config, limit)
    parsed.request.model_version = model.version
    parsed.request.arrival_ns = arrival_ns
    return model, parsed


async def _coded(
    request: web.BaseRequest, encoded: EncodedInfer
) -> tuple[dict[str, str], deque[bytes]]:
    """The headers of a response and its body, compressed by the client's preferred coding."""
    headers = {"Content-Type": JSON}
    if encoded.json_bytes is not None:
        headers["Content-Type"] = "application/octet-stream"
        headers[LENGTH_HEADER] = str(encoded.json_bytes)
    coding = best_coding(request.headers.get("Accept-Encoding", ""))
    if coding == "identity":
        return headers, encoded.parts
    headers["Content-Encoding"] = coding
    work = partial(compress, b"".join(encoded.parts), coding)
    # Compression that takes longer than a few milliseconds runs in a thread.
    is_long = encoded.num_bytes > LONG_ANSWER_BYTES
    return headers, deque([await asyncio.to_thread(work) if is_long else work()])
