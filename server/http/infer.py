"""``POST .../infer``."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.decoding.body import SHORT_BYTES, Body, LongBody, view_of
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.decoding.pending import BodyMemory, PendingBodies
from trimaran.server.direct.plain_request import PlainRequest
from trimaran.server.http.messages import (
    JSON,
    LONG_ANSWER_BYTES,
    best_coding,
    compress,
    decompress,
    read_body,
    send_json,
    write_parts,
)
from trimaran.server.http.routes import Route
from trimaran.server.inference.cooperative import run_cooperatively
from trimaran.server.inference.forwarded_headers import HeaderForwarding
from trimaran.server.inference.request import InferRequest, InferResponse, Model
from trimaran.server.protocol import json_access
from trimaran.server.protocol.infer_json import (
    ParsedInfer,
    RequestedOutput,
    header_length,
    parse_infer,
    parse_members,
)
from trimaran.server.protocol.infer_response import encode_infer
from trimaran.server.protocol.plain_infer import PlainInferReader
from trimaran.server.service import Service

# Decoding that takes longer than a few milliseconds runs in a thread.
_SHORT_CODED_BYTES = 4 << 10

_PLAIN_HEADERS = {"Content-Type": JSON}
LENGTH_HEADER = "Inference-Header-Content-Length"
DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"


class InferEndpoint:
    """The ``infer`` route. Closing a request's connection cancels the request."""

    def __init__(self, service: Service, decoder: Decoder, pending: PendingBodies) -> None:
        self._service = service
        self._decoder = decoder
        self._pending = pending
        self._readers: WeakKeyDictionary[Model, PlainInferReader] = WeakKeyDictionary()
        pattern = service.config.http_header_forward_pattern
        self._forwarding = HeaderForwarding("--http-header-forward-pattern", pattern)

    async def infer(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        """Answer one inference request.

        Raises:
            RequestError: anything but success.
        """
        service = self._service
        service.admission.check()
        model = service.registry.get_ready(route.name, route.version)
        if model.is_decoupled:
            raise RequestError(DECOUPLED, ErrorKind.UNSUPPORTED)
        with self._pending.body() as memory:
            sent = await self._read(request, memory)
            with service.admission.admit():
                with service.admission.unless_aborted():
                    model, parsed, plain = await self._parsed(request, route, sent)
                    memory.release()
                    response = await service.infer_once(model, parsed, plain)
                    headers, parts, is_long = await _encoded(request, response, parsed)
                if is_long:
                    is_last = service.admission.is_draining
                    return await write_parts(request, parts, headers, is_last=is_last)
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        if headers == _PLAIN_HEADERS:
            return await send_json(request, body, is_last=service.admission.is_draining)
        return web.Response(body=body, headers=headers)

    async def _read(self, request: web.BaseRequest, memory: BodyMemory) -> Body:
        """The decompressed body."""
        limit = self._service.config.http_max_input_bytes
        body = await read_body(request, limit, memory)
        coding = request.headers.get("Content-Encoding", "")
        if coding and len(body) > _SHORT_CODED_BYTES:
            memory.add(limit)
            return await asyncio.to_thread(decompress, body, coding, limit)
        return decompress(body, coding, limit)

    async def _parsed(
        self, request: web.BaseRequest, route: Route, body: Body
    ) -> tuple[Model, ParsedInfer, PlainRequest | None]:
        """The model, its request, and the plain request where there is one: that has no
        tensors."""
        arrival_ns = time.monotonic_ns()
        # While the body came the model may have been replaced.
        ready = partial(self._service.registry.get_ready, route.name, route.version)
        model = ready()
        json_bytes = header_length(request.headers.get(LENGTH_HEADER), len(body))
        limit = self._service.config.http_max_input_bytes
        if json_bytes > SHORT_BYTES and isinstance(body, LongBody):
            model, parsed = await self._decoder.read_infer(body, json_bytes, ready)
        elif isinstance(body, bytes) and 0 < json_bytes == len(body):
            document = json_access.parse(body)
            found = self._plain_reader(model).read(document)
            if found is not None:
                only = ParsedInfer(InferRequest(model_name=model.name, id=found.id))
                only.outputs = [RequestedOutput(name) for name in found.outputs]
                self._complete(only, request, model, arrival_ns)
                plain = self._service.plain(model, only, found.values)
                if plain is not None:
                    return model, only, plain
            parsed = parse_members(document, memoryview(b""), model.config, limit)
        else:
            parsed = parse_infer(view_of(body), json_bytes, model.config, limit)
        self._complete(parsed, request, model, arrival_ns)
        await self._service.find_slices(parsed, limit)
        return model, parsed, None

    def _complete(
        self, parsed: ParsedInfer, request: web.BaseRequest, model: Model, arrival_ns: int
    ) -> None:
        parsed.request.model_version = model.version
        parsed.request.arrival_ns = arrival_ns
        self._forwarding.apply(parsed.request, request.raw_headers)

    def _plain_reader(self, model: Model) -> PlainInferReader:
        reader = self._readers.get(model)
        if reader is None:
            reader = self._readers[model] = PlainInferReader(model.config)
        return reader


async def _encoded(
    request: web.BaseRequest, response: InferResponse, parsed: ParsedInfer
) -> tuple[dict[str, str], deque[Any], bool]:
    """The headers of a response; its body in parts, compressed by the client's preferred
    coding; and whether it is long, or has `LongValues`."""
    coding = best_coding(request.headers.get("Accept-Encoding", ""))
    is_coded = coding != "identity"
    encoded = await run_cooperatively(encode_infer(response, parsed, is_coded=is_coded))
    headers = {"Content-Type": JSON}
    if encoded.json_bytes is not None:
        headers["Content-Type"] = "application/octet-stream"
        headers[LENGTH_HEADER] = str(encoded.json_bytes)
    is_long = encoded.num_bytes is None or encoded.num_bytes > LONG_ANSWER_BYTES
    if not is_coded:
        return headers, encoded.parts, is_long
    headers["Content-Encoding"] = coding
    work = partial(_compressed, encoded.parts, coding)
    # What takes longer than a few milliseconds runs in a thread, the copy of the parts too.
    return headers, deque([await asyncio.to_thread(work) if is_long else work()]), is_long


def _compressed(parts: Iterable[Any], coding: str) -> bytes:
    return compress(b"".join(parts), coding)
