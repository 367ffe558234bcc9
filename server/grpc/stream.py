"""``ModelStreamInfer``: any number of requests on one stream, answered as they progress."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio
from tritonclient.grpc import service_pb2 as pb

from trimaran.comm.errors import ErrorKind, RefusedError, RequestError
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.grpc.messages import FINAL, InferMessage, fill_response, utf8
from trimaran.server.grpc.status import CallStatus, Context
from trimaran.server.grpc.stream_answers import StreamEncoder
from trimaran.server.inference.cooperative import run_cooperatively
from trimaran.server.inference.forwarded_headers import HeaderForwarding
from trimaran.server.inference.request import InferResponse, Model
from trimaran.server.protocol.infer_json import ParsedInfer
from trimaran.server.service import INTERNAL, Service

logger = logging.getLogger(__name__)

GRPC_STOPPING = "GRPC server is shutting down and has stopped accepting new requests."
MAX_REQUESTS = 1 << 14
"""Requests of one stream that are served at a time."""

_LONG_S = 24 * 3600.0
_END_ON_ERROR = ("triton_grpc_error", "true")


class _ClientGoneError(Exception):
    """The client is gone; the end of the call cancels the running requests."""


class StreamSession:
    """One stream. Its requests run concurrently; the end of the stream ends them.

    Messages of different requests interleave. Requests for non-decoupled models are answered in
    order, including refused and failed ones: common client libraries do not see the id of an
    error. Writing waits for the client, so a slow reader delays only the requests of its own
    stream.
    """

    def __init__(
        self,
        service: Service,
        decoder: Decoder,
        forwarding: HeaderForwarding,
        context: Context,
    ) -> None:
        self._service = service
        self._decoder = decoder
        self._context = context
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_ordered: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[CallStatus] = self._loop.create_future()
        self._stall: asyncio.Future[CallStatus] = self._loop.create_future()
        """Ends the call although a message is on its way, which the client does not take."""
        self._writing_since: float | None = None
        self._send_timeout_s = service.config.grpc_send_timeout_s
        self._forwarding = forwarding
        self._metadata = context.invocation_metadata() or ()
        self._ends_on_error = any(tuple(pair) == _END_ON_ERROR for pair in self._metadata)

    async def run(self, requests: AsyncIterator[InferMessage]) -> CallStatus | None:
        """Serve until the client sends no more and everything is answered.

        Returns the status of an error, for clients whose calls errors end.
        """
        reader = asyncio.ensure_future(self._read(requests))
        self._watch_writing()
        try:
            ends: set[asyncio.Future[Any]] = {reader, self._failure, self._stall}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._stall.done():
                return self._stall.result()
            # Never released: a call whose last message is cut off gets no status either.
            await self._writing.acquire()
            if self._failure.done():
                return self._failure.result()
            await reader
            return None
        finally:
            self._watch.cancel()
            leftover = [reader, *self._tasks]
            for task in leftover:
                task.cancel()
            await asyncio.gather(*leftover, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[InferMessage]) -> None:
        async for message in requests:
            arrival_ns = time.monotonic_ns()
            is_ordered = self._is_ordered(message)
            before = self._last_ordered if is_ordered else None
            task = asyncio.ensure_future(self._serve(message, arrival_ns, before))
            if is_ordered:
                self._last_ordered = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if len(self._tasks) >= MAX_REQUESTS:
                # The client's next messages wait in its own buffers.
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _is_ordered(self, message: InferMessage) -> bool:
        try:
            names = message.names
            model = self._service.registry.get(names.model_name, names.model_version)
        except RequestError:
            # Refused like a request of a model that is not decoupled.
            return True
        return not model.is_decoupled

    async def _serve(
        self,
        message: InferMessage,
        arrival_ns: int,
        before: asyncio.Task[None] | None,
    ) -> None:
        try:
            await self._respond(message, arrival_ns, before)
        except _ClientGoneError:
            logger.debug("the client of request '%s' left", message.names.id)

    async def _respond(
        self,
        message: InferMessage,
        arrival_ns: int,
        before: asyncio.Task[None] | None,
    ) -> None:
        try:
            admission = self._service.admission
            with admission.admit(GRPC_STOPPING):
                with admission.unless_aborted():
                    model, parsed, responses = await self._start(message, arrival_ns)
                await self._answer(message, model, parsed, responses, before)
        except _ClientGoneError:
            raise
        except RequestError as error:
            await self._refuse(message, error, before)
        except Exception:
            logger.exception("a streamed request of model %s failed", message.names.model_name)
            await self._fail(message, RequestError(INTERNAL, ErrorKind.INTERNAL), before)

    async def _start(
        self, message: InferMessage, arrival_ns: int
    ) -> tuple[Model, ParsedInfer, AsyncIterator[InferResponse]]:
        names = message.names
        model = self._service.registry.get_ready(names.model_name, names.model_version)
        parsed = await message.parse(self._decoder)
        parsed.request.model_version = names.model_version
        parsed.request.arrival_ns = arrival_ns
        self._forwarding.apply(parsed.request, self._metadata)
        await self._service.find_slices(parsed, self._service.config.grpc_max_message_bytes)
        responses = await self._service.infer(
            model, parsed.request, parsed.inputs, parsed.outputs
        )
        return model, parsed, responses

    async def _answer(
        self,
        message: InferMessage,
        model: Model,
        parsed: ParsedInfer,
        responses: AsyncIterator[InferResponse],
        before: asyncio.Task[None] | None,
    ) -> None:
        has_begun, has_ended, is_decoupled = False, False, model.is_decoupled
        encoder = StreamEncoder()
        try:
            with self._service.admission.unless_aborted():
                async with aclosing(responses):  # type: ignore[type-var]
                    async for response in responses:
                        await _over(before)
                        has_begun = True
                        response.is_final = response.is_final or not is_decoupled
                        response.id = message.names.id
                        await self._send(model, parsed, encoder, response)
                        has_ended = response.is_final
        except RequestError as error:
            if has_ended:
                return
            is_refused = isinstance(error, RefusedError) and not has_begun
            with self._service.admission.unless_aborted():
                await (self._refuse if is_refused else self._fail)(message, error, before)
            return
        if not has_ended and parsed.wants_empty_final:
            final = pb.ModelStreamInferResponse()
            _name(final.infer_response, message)
            await self._write(final)

    async def _send(
        self, model: Model, parsed: ParsedInfer, encoder: StreamEncoder, response: InferResponse
    ) -> None:
        """Send a response with the outputs that the client asked for: all if it named none."""
        if parsed.outputs:
            await self._service.select(model, response, parsed)
        short = None
        if not parsed.targets:
            short = encoder.encode_short(response, is_final=response.is_final)
        await self._write(short or await _encoded(parsed, response))

    async def _refuse(
        self,
        message: InferMessage,
        error: RequestError,
        before: asyncio.Task[None] | None,
    ) -> None:
        """The request did not run: the client gets the id alone, and the call goes on."""
        await _over(before)
        refusal = pb.ModelStreamInferResponse(error_message=utf8(str(error)))
        refusal.infer_response.id = message.names.id
        await self._write(refusal)

    async def _fail(
        self,
        message: InferMessage,
        error: RequestError,
        before: asyncio.Task[None] | None,
    ) -> None:
        if self._ends_on_error:
            if not self._failure.done():
                self._failure.set_result(CallStatus.of_error(error))
            return
        await _over(before)
        failure = pb.ModelStreamInferResponse(error_message=utf8(str(error)))
        _name(failure.infer_response, message)
        await self._write(failure)

    async def _write(self, message: pb.ModelStreamInferResponse | bytes) -> None:
        async with self._writing:
            try:
                # The call accepts the next message only after this one has been sent.
                with self._service.admission.uninterrupted():
                    self._writing_since = self._loop.time()
                    await self._context.write(message)
            except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
                # The call ended while this message was being sent.
                raise _ClientGoneError from error
            finally:
                self._writing_since = None

    def _watch_writing(self) -> None:
        """Look at the message on its way when that could be late: one timer a stream."""
        timeout_s, since = self._send_timeout_s, self._writing_since
        now = self._loop.time()
        if timeout_s and since is not None and now - since >= timeout_s:
            error = RequestError(
                f"the client took no message for {timeout_s:g} s (--grpc-send-timeout): the "
                "requests of its stream are cancelled",
                ErrorKind.CANCELLED,
            )
            self._stall.set_result(CallStatus.of_error(error))
            return
        due = (now if since is None else since) + (timeout_s or _LONG_S)
        self._watch = self._loop.call_at(due, self._watch_writing)


async def _encoded(parsed: ParsedInfer, response: InferResponse) -> pb.ModelStreamInferResponse:
    message = pb.ModelStreamInferResponse()
    await run_cooperatively(fill_response(message.infer_response, response, parsed.targets))
    message.infer_response.parameters[FINAL].bool_param = response.is_final
    return message


async def _over(before: asyncio.Task[None] | None) -> None:
    """Return once the request ahead in order has been answered."""
    if before is not None:
        await asyncio.wait({before})


def _name(response: pb.ModelInferResponse, request: InferMessage) -> None:
    """Make a response the last one of a request, without tensors."""
    response.model_name = request.names.model_name
    response.model_version = request.names.model_version
    response.id = request.names.id
    response.parameters[FINAL].bool_param = True
