"""``POST .../generate`` and ``POST .../generate_stream``."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from trimaran.comm.errors import RefusedError, RequestError
from trimaran.server.decoding.body import Body, LongBody
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.decoding.pending import BodyMemory, PendingBodies
from trimaran.server.http.messages import (
    JSON,
    LONG_ANSWER_BYTES,
    EventWriter,
    read_body,
    retry_header,
    send_json,
    write_parts,
)
from trimaran.server.http.routes import Route
from trimaran.server.inference.cooperative import run_cooperatively
from trimaran.server.inference.request import InferRequest, InferResponse, Model
from trimaran.server.inference.validation import WireInput
from trimaran.server.protocol.generate import (
    EXACTLY_ONE,
    GenerateEncoder,
    GenerateMapper,
    error_object,
)
from trimaran.server.protocol.infer_response import sum_of_lengths
from trimaran.server.service import INTERNAL, Service

_LOAD_FORMAT_HEADER = "endpoint-load-metrics-format"
_LOAD_HEADER = "endpoint-load-metrics"
logger = logging.getLogger(__name__)

_EVENT_STREAM = "text/event-stream; charset=utf-8"


class GenerateEndpoint:
    """Both generate routes. Closing a request's connection cancels the request."""

    def __init__(self, service: Service, decoder: Decoder, pending: PendingBodies) -> None:
        self._service = service
        self._decoder = decoder
        self._pending = pending
        self._mappers: WeakKeyDictionary[Model, GenerateMapper] = WeakKeyDictionary()
        self._encoder = GenerateEncoder()
        """The encoder of short answers; a stream has its own."""

    async def generate(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        """Answer with the model's only response as one JSON object.

        Raises:
            RequestError: nothing was answered.
        """
        admission = self._service.admission
        with self._pending.body() as memory:
            body = await self._read(request, route, memory)
            with admission.admit():
                with admission.unless_aborted():
                    parts = await self._only_parts(route, body, memory)
                load, num_bytes = self._load_header(request), sum_of_lengths(parts)
                if num_bytes is None or num_bytes > LONG_ANSWER_BYTES:
                    headers = {"Content-Type": JSON, **load}
                    is_last = admission.is_draining
                    return await write_parts(request, parts, headers, is_last=is_last)
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        if load:
            return web.Response(body=body, headers={"Content-Type": JSON, **load})
        return await send_json(request, body, is_last=admission.is_draining)

    async def generate_stream(
        self, request: web.BaseRequest, route: Route
    ) -> web.StreamResponse:
        """Answer with one server-sent event a response.

        Raises:
            RequestError: nothing was answered.
        """
        with self._pending.body() as memory:
            body = await self._read(request, route, memory)
            return await self._answer_stream(request, route, body, memory)

    async def _answer_stream(
        self, request: web.BaseRequest, route: Route, body: Body, memory: BodyMemory
    ) -> web.StreamResponse:
        admission = self._service.admission
        with admission.admit():
            with admission.unless_aborted():
                parsed, responses = await self._start(route, body, memory)
            async with aclosing(responses):  # type: ignore[type-var]
                first, refusal = await self._first(responses)
                headers = {"Content-Type": _EVENT_STREAM, **self._load_header(request)}
                if refusal is not None:
                    headers.update(retry_header(refusal))
                # As in Triton, the first response determines the status of the stream.
                status = 200 if refusal is None else refusal.kind.http_status
                stream = web.StreamResponse(status=status, headers=headers)
                if request.version >= (1, 1):
                    stream.enable_chunked_encoding()
                if admission.is_draining:
                    stream.force_close()
                await stream.prepare(request)
                writer = EventWriter(request, stream)
                if refusal is not None:
                    await writer.write(error_object(str(refusal)))
                if first is not None:
                    await self._write_events(writer, parsed, first, responses)
            await stream.write_eof()
        return stream

    async def _first(
        self, responses: AsyncIterator[InferResponse]
    ) -> tuple[InferResponse | None, RequestError | None]:
        """The model's first response, or its error; None of both if there is no response.

        Raises:
            RefusedError: the queue is full: the model did not begin.
        """
        with self._service.admission.unless_aborted():
            try:
                return await anext(responses, None), None
            except RefusedError:
                raise
            except RequestError as error:
                return None, error

    async def _write_events(
        self,
        writer: EventWriter,
        request: InferRequest,
        first: InferResponse,
        responses: AsyncIterator[InferResponse],
    ) -> None:
        """Write all responses. A slow reader delays its own request only."""
        encoder = GenerateEncoder()
        first.id = request.id
        try:
            with self._service.admission.unless_aborted():
                await writer.write(await run_cooperatively(encoder.encode(first)))
                async for response in responses:
                    response.id = request.id
                    event = encoder.encode_short(response)
                    if event is None:
                        event = await run_cooperatively(encoder.encode(response))
                    if not writer.write_at_once(event):
                        await writer.write(event)
        except RequestError as error:
            await writer.write(error_object(str(error)))
        except ConnectionError:
            raise
        except Exception:
            # The status is already sent: errors go into an event.
            logger.exception("a stream of model %s failed", request.model_name)
            await writer.write(error_object(INTERNAL))

    async def _read(self, request: web.BaseRequest, route: Route, memory: BodyMemory) -> Body:
        service = self._service
        service.admission.check()
        # A model that cannot answer is refused before its body is read.
        service.registry.get_ready(route.name, route.version)
        if request.headers.get("Content-Encoding", "identity") not in ("", "identity"):
            raise RequestError("Unsupported content-encoding, only 'identity' is supported.")
        return await read_body(request, service.config.http_max_input_bytes, memory)

    async def _only_parts(self, route: Route, body: Body, memory: BodyMemory) -> deque[Any]:
        """The answer of one JSON object, in parts.

        Raises:
            RequestError: nothing was answered.
        """
        arrival_ns = time.monotonic_ns()
        if isinstance(body, LongBody):
            return await _only_answer(*await self._start(route, body, memory), self._encoder)
        model = self._service.registry.get_ready(route.name, route.version)
        mapper = self._mapper(model)
        document = mapper.document(body)
        memory.release()
        direct, found = self._service.direct(model), mapper.plain_values(document)
        if direct is not None and found is not None:
            request_id, values = found
            request = InferRequest(
                model_name=model.name, model_version=model.version, id=request_id,
                arrival_ns=arrival_ns,
            )  # fmt: skip
            plain = direct.reader.of_values(request, values)
            if plain is not None:
                answer = await direct.run(model, plain)
                response = direct.response(request)
                encoder = GenerateEncoder() if request_id else self._encoder
                return deque(
                    (encoder.encode_text(response, direct.reader.output, answer.text),)
                )
        request, inputs = mapper.request_of(document)
        responses = await self._infer(model, request, inputs, arrival_ns)
        return await _only_answer(request, responses, self._encoder)

    async def _start(
        self, route: Route, body: Body, memory: BodyMemory
    ) -> tuple[InferRequest, AsyncIterator[InferResponse]]:
        arrival_ns = time.monotonic_ns()
        # Looked up after the body: the model may be replaced while the body arrives.
        ready = partial(self._service.registry.get_ready, route.name, route.version)
        if isinstance(body, LongBody):
            model, read = await self._decoder.read_generate(body, ready)
            parsed, inputs = read.request, read.inputs
        else:
            model = ready()
            parsed, inputs = self._mapper(model).parse(body)
        memory.release()
        return parsed, await self._infer(model, parsed, inputs, arrival_ns)

    async def _infer(
        self, model: Model, request: InferRequest, inputs: list[WireInput], arrival_ns: int
    ) -> AsyncIterator[InferResponse]:
        request.model_version = model.version
        request.arrival_ns = arrival_ns
        return await self._service.infer(model, request, inputs)

    def _mapper(self, model: Model) -> GenerateMapper:
        mapper = self._mappers.get(model)
        if mapper is None:
            mapper = GenerateMapper(model.config, self._service.config.http_max_input_bytes)
            self._mappers[model] = mapper
        return mapper

    def _load_header(self, request: web.BaseRequest) -> dict[str, str]:
        style = request.headers.get(_LOAD_FORMAT_HEADER)
        value = self._service.metrics.load_header(style) if style else None
        return {_LOAD_HEADER: value} if value else {}


async def _only_answer(
    request: InferRequest, responses: AsyncIterator[InferResponse], encoder: GenerateEncoder
) -> deque[Any]:
    """The only response as the parts of a JSON object, or the error of a model with several
    responses.

    Raises:
        RequestError: the first response is an error, which determines the status.
    """
    async with aclosing(responses):  # type: ignore[type-var]
        only = await anext(responses, None)
        if only is None:
            return deque([error_object(EXACTLY_ONE)])
        only.id = request.id
        answer: deque[Any]
        short = encoder.encode_short(only)
        if short is not None:
            answer = deque([short])
        else:
            # Its own encoder: others may be at work between two slices.
            answer = deque(await run_cooperatively(GenerateEncoder().encode_parts(only)))
        try:
            async for _ in responses:
                answer = deque([error_object(EXACTLY_ONE)])
        except RequestError:
            answer = deque([error_object(EXACTLY_ONE)])
    return answer
