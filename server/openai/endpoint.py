"""Runs generating requests: a body in, one document or a stream of events out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from typing import Any, cast

from aiohttp import web

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.config import OpenAiConfig
from trimaran.server.decoding.body import Body, LongBody
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.decoding.pending import BodyMemory, PendingBodies
from trimaran.server.direct.direct_text import PlainAnswer
from trimaran.server.http.messages import EventWriter, read_body, send_document
from trimaran.server.inference.admission import Admission
from trimaran.server.models.text_request import TextChunk, TextRequest
from trimaran.server.openai.answers import Answer, ResponseMetadata, Usage
from trimaran.server.openai.chat_templates import RenderedWithin, SlowTemplateError
from trimaran.server.openai.errors import ApiError, ErrorFacts, in_members
from trimaran.server.openai.models import OpenAIModels, ServedModel, facts_of
from trimaran.server.openai.requests import BodyTask, GenerationRequest
from trimaran.server.protocol import json_access
from trimaran.server.service import INTERNAL, Service

logger = logging.getLogger(__name__)

INLINE_BODY_BYTES = 16 << 10
"""A body up to this is read on the event loop: within a few milliseconds."""

INLINE_OBJECTS = 128
"""So many JSON objects at most: templates take time for each message."""

INLINE_RENDER_S = 0.02
"""Longest time for a chat template on the event loop."""

READ_TIMEOUT_S = 20.0
"""Longest time for a body that is read in a process, its chat template among it."""

_INLINE_TOKENS = 1 << 9
"""Tokens, with the likeliest tokens of their positions: a longer answer, and a longer part of a
stream, is made in a thread."""

_EVENT_STREAM = "text/event-stream; charset=utf-8"

MakeAnswer = Callable[[ResponseMetadata, GenerationRequest, Any, Usage], Answer]


class GenerationEndpoint:
    """A route that generates. Closing a request's connection cancels the request."""

    def __init__(
        self,
        service: Service,
        decoder: Decoder,
        pending: PendingBodies,
        models: OpenAIModels,
        config: OpenAiConfig,
    ) -> None:
        self._service = service
        self._decoder = decoder
        self._pending = pending
        self._models = models
        self._config = config

    @property
    def admission(self) -> Admission:
        """That of the server."""
        return self._service.admission

    async def generate(
        self,
        request: web.BaseRequest,
        prefix: str,
        make: MakeAnswer,
        reader: Callable[..., GenerationRequest],
        *,
        default_max_tokens: int | None = None,
        is_chat: bool = False,
    ) -> web.StreamResponse:
        """Answer a request that ``reader`` reads, with what ``make`` makes. ``prefix`` begins
        the answer's id; ``default_max_tokens`` is for requests that set no limit.

        Raises:
            RequestError: nothing was answered.
        """
        admission = self._service.admission
        with self._pending.body() as memory:
            body = await self.read_body(request, memory)
            with admission.admit():
                with admission.unless_aborted():
                    generation = await self.read(body, reader, is_chat=is_chat)
                    memory.release()
                    served = await self._models.find(generation.model)
                    facts = facts_of(served.pipeline)
                    wanted = self._text_request(served, generation, facts, default_max_tokens)
                    tokenizer = served.pipeline.steps.tokenizer
                    block = int(facts.get("tokens_per_block", 0))
                    metadata = ResponseMetadata.new(prefix, generation.model, _tier(generation))
                    answer = make(metadata, generation, tokenizer, Usage(block))
                    wanted.id = metadata.id
                try:
                    if generation.params.is_streaming:
                        members = generation.guide_members
                        return await self._stream(request, served, wanted, answer, members)
                    with admission.unless_aborted():
                        document = await self._whole(served, wanted, answer)
                except RequestError as error:
                    raise in_members(error, generation.guide_members) from None
                return await send_document(request, document, is_last=admission.is_draining)

    async def read_body(self, request: web.BaseRequest, memory: BodyMemory) -> Body:
        """The whole body.

        Raises:
            RequestError: too long, compressed, or the server is draining.
        """
        self._service.admission.check()
        if request.headers.get("Content-Encoding", "identity") not in ("", "identity"):
            raise ApiError("Content-Encoding is not served: send the body uncompressed")
        return await read_body(request, self._service.config.http_max_input_bytes, memory)

    async def read(
        self, body: Body, reader: Callable[..., Any], *, is_chat: bool = False
    ) -> Any:
        """What a body asks for; chats are read with the templates of all models.

        Raises:
            ApiError: the body is wrong.
        """
        arguments = (await self._models.chat_models(),) if is_chat else ()
        task = BodyTask(reader, self._service.config.http_max_input_bytes, arguments)
        if isinstance(body, LongBody):
            found = await self._decoder.read_other(task, body, READ_TIMEOUT_S)
        elif len(body) > INLINE_BODY_BYTES or body.count(b"{") > INLINE_OBJECTS:
            found = await self._decoder.read_other(task, LongBody((body,)), READ_TIMEOUT_S)
        else:
            try:
                with RenderedWithin(INLINE_RENDER_S):
                    found = task.read(body)
            except SlowTemplateError:
                # The template takes long for this chat: begun anew, where only the chat waits.
                found = await self._decoder.read_other(task, LongBody((body,)), READ_TIMEOUT_S)
        if isinstance(found, ErrorFacts):
            raise found.error()
        return found

    def _text_request(
        self,
        served: ServedModel,
        request: GenerationRequest,
        facts: Mapping[str, Any],
        default_max_tokens: int | None,
    ) -> TextRequest:
        """The request for a model whose engine has these facts."""
        wanted = TextRequest(
            model_name=served.name,
            prompts=request.prompts,
            prompt_ids=request.prompt_ids,
            add_special_tokens=request.add_special_tokens,
            arrival_ns=time.monotonic_ns(),
        )
        most = served.model.config.max_batch_size or 1
        if len(wanted.prompts) > most:
            raise ApiError(
                f"'prompt' holds {len(wanted.prompts)} prompts, and the model takes at most "
                f"{most} (max_batch_size). Send several requests.",
                param="prompt",
            )
        if request.params.biases:
            num_ids = int(facts.get("vocab_size", served.pipeline.steps.tokenizer.num_ids))
            _check_biases(request.params.biases, num_ids)
        limit = self._config.default_max_tokens or default_max_tokens
        if limit is None:
            # The engine lowers the number to the room that the prompt leaves.
            limit = int(facts.get("max_seq_len", 1))
        request.params.fill(wanted, limit)
        wanted.num_top = request.num_top or 0
        if served.adapter:
            wanted.sampling = {**wanted.sampling, "lora_name": served.adapter}
        wanted.priority = _priority(request.params.service_tier, served)
        return wanted

    async def _whole(self, served: ServedModel, wanted: TextRequest, answer: Answer) -> bytes:
        """The answer's document."""
        direct = self._service.direct(served.model)
        plain = direct.reader.of_text_request(wanted) if direct is not None else None
        if direct is not None and plain is not None:
            return await self._added(answer, _chunk_of(await direct.run(served.model, plain)))
        num_tokens = num_inline = 0
        async with aclosing(_chunks(served, wanted)) as chunks:
            async for chunk in chunks:
                num_tokens += max(chunk.num_output, _num_tokens(chunk))
                num_inline += _num_tokens(chunk)
                # The sequences of a request may all end at once.
                if _is_long(chunk) or num_inline > _INLINE_TOKENS:
                    num_inline = 0
                    await asyncio.to_thread(answer.add, chunk)
                else:
                    answer.add(chunk)
        if num_tokens > _INLINE_TOKENS:
            return await asyncio.to_thread(_dumped_in_parts, answer)
        is_plain = "return_log_probs" not in wanted.sampling
        return _dumped(answer) if is_plain else _dumped_in_parts(answer)

    @staticmethod
    async def _added(answer: Answer, chunk: TextChunk) -> bytes:
        """The document of an answer's only chunk."""
        if _is_long(chunk):
            await asyncio.to_thread(answer.add, chunk)
            return await asyncio.to_thread(_dumped_in_parts, answer)
        answer.add(chunk)
        return _dumped(answer)

    async def _stream(
        self,
        request: web.BaseRequest,
        served: ServedModel,
        wanted: TextRequest,
        answer: Answer,
        guide_members: Sequence[str],
    ) -> web.StreamResponse:
        admission = self._service.admission
        async with aclosing(_chunks(served, wanted)) as chunks:
            with admission.unless_aborted():
                # An error before the first text determines the status.
                first = await anext(chunks, None)
            headers = {"Content-Type": _EVENT_STREAM, "Cache-Control": "no-cache"}
            stream = web.StreamResponse(headers=headers)
            if request.version >= (1, 1):
                stream.enable_chunked_encoding()
            if admission.is_draining:
                stream.force_close()
            await stream.prepare(request)
            writer = EventWriter(request, stream)
            try:
                await self._write(writer, answer, first, chunks)
            except RequestError as error:
                named = in_members(error, guide_members)
                await _write_all(writer, answer.failure(ErrorFacts.of(named)))
        await stream.write_eof()
        return stream

    async def _write(
        self,
        writer: EventWriter,
        answer: Answer,
        first: TextChunk | None,
        chunks: AsyncIterator[TextChunk],
    ) -> None:
        """Write all events. A slow reader delays its own request only.

        Raises:
            RequestError: the request failed after its first event.
        """
        try:
            with self._service.admission.unless_aborted():
                # The first text leaves with the events before it, in one call of the system.
                events = answer.opening()
                if first is not None:
                    events += await _events_of(answer, first)
                if events:
                    await writer.write_together(events)
                await _write_chunks(writer, answer, chunks)
                if answer.closes_at_once:
                    await _write_all(writer, answer.closing())
                else:
                    await _write_all(writer, await asyncio.to_thread(answer.closing))
        except (RequestError, ConnectionError):
            raise
        except Exception:
            # The status is already sent: errors go into an event.
            logger.exception("a stream failed")
            facts = ErrorFacts(INTERNAL, None, None, ErrorKind.INTERNAL)
            await _write_all(writer, answer.failure(facts))


def _chunk_of(answer: PlainAnswer) -> TextChunk:
    """The chunk of a job that took the short way."""
    return TextChunk(
        model_name="",
        model_version="",
        is_final=True,
        text=answer.text,
        token_ids=answer.token_ids,
        finish_reason=answer.finish_reason,
        num_input=answer.num_input,
        num_output=len(answer.token_ids),
        figures=answer.figures,
    )


def _is_long(chunk: TextChunk) -> bool:
    """Whether a chunk takes too much time for the event loop."""
    return chunk.logits is not None or _num_tokens(chunk) > _INLINE_TOKENS


def _num_tokens(chunk: TextChunk) -> int:
    """The tokens of a chunk, with the likeliest tokens of their positions."""
    count = len(chunk.token_ids)
    return count + sum(map(len, chunk.tops)) if chunk.tops else count


async def _write_all(writer: EventWriter, events: Iterable[bytes]) -> None:
    for event in events:
        await writer.write(event)


async def _write_chunks(
    writer: EventWriter, answer: Answer, chunks: AsyncIterator[TextChunk]
) -> None:
    """Write the events of all chunks; a coroutine for each would take its time."""
    async for chunk in chunks:
        if _is_long(chunk):
            await _write_chunk(writer, answer, chunk)
            continue
        for event in answer.events(chunk):
            if not writer.write_at_once(event):
                await writer.write(event)


async def _write_chunk(writer: EventWriter, answer: Answer, chunk: TextChunk) -> None:
    """Write the events of a chunk."""
    for event in await _events_of(answer, chunk):
        if not writer.write_at_once(event):
            await writer.write(event)


async def _events_of(answer: Answer, chunk: TextChunk) -> list[bytes]:
    if _is_long(chunk):
        return await asyncio.to_thread(answer.events, chunk)
    return answer.events(chunk)


def _chunks(served: ServedModel, wanted: TextRequest) -> AsyncGenerator[TextChunk, None]:
    """The chunks of a request; closing them cancels the request."""
    # The model's own iterator: one more around it would take its time for each token.
    responses = served.model.infer(served.pipeline.adopt(wanted))
    return cast("AsyncGenerator[TextChunk, None]", responses)


def _dumped(answer: Answer) -> bytes:
    return json_access.dump(answer.document())


def _dumped_in_parts(answer: Answer) -> bytes:
    return json_access.dump_in_parts(answer.document())


def _check_biases(ids: Collection[int], num_ids: int) -> None:
    """Refuse ids outside the vocabulary before an array of that length is made.

    Raises:
        ApiError: names the id and the vocabulary's size.
    """
    highest = max(ids, default=-1)
    if highest >= num_ids:
        raise ApiError(
            f"'logit_bias' names the id {highest}, and the vocabulary has {num_ids} ids. "
            "Leave ids outside the vocabulary out.",
            param="logit_bias",
        )


def _num_levels(served: ServedModel) -> int:
    batching = served.pipeline.steps.token.config.dynamic_batching
    return int(batching.priority_levels)


def _priority(tier: str | None, served: ServedModel) -> int:
    """The priority level of a tier; 0 is the model's default.

    Raises:
        ApiError: the model has no levels, so that the tier would have no effect.
    """
    if tier not in ("flex", "priority"):
        return 0
    num_levels = _num_levels(served)
    if not num_levels:
        raise ApiError(
            f"'service_tier' is '{tier}' but the model has no priority levels. Leave the "
            "member out, or set priority_levels in dynamic_batching of the token model's "
            "config.pbtxt.",
            param="service_tier",
        )
    return 1 if tier == "priority" else num_levels


def _tier(request: GenerationRequest) -> str | None:
    """The tier that an answer names: the served tier, where a request names a tier."""
    tier = request.params.service_tier
    return "default" if tier in ("auto", "scale") else tier
