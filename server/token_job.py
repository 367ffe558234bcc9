"""A parsed token-level request: its samples, and the merged stream of their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

from trimaran.comm.messages import pack_ids
from trimaran.comm.sampling_params import SamplingParams
from trimaran.server.engine_client import EngineClient
from trimaran.server.inference import InferRequest, InferResponse
from trimaran.server.live_request import LiveRequest, TokenChunk


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt of a request."""

    prompt_ids: list[int]
    sampling: SamplingParams


@dataclass(slots=True, kw_only=True)
class TokenJob(InferRequest):
    """A token-level request of a text model in this process.

    It travels as an ordinary request, so that it is counted as one, but is answered
    with `ChunkResponse`, which spares a tensor for every token.
    """


@dataclass(slots=True, kw_only=True)
class ChunkResponse(InferResponse):
    """New ids of one sequence instead of tensors."""

    sample: int = 0
    sequence: int = 0
    chunk: TokenChunk = field(default_factory=TokenChunk)
    end_sequence: Callable[[], None]
    """Ends this sequence with what it has: a stop word stands in its text."""


class TokenStream:
    """All sequences of one request at the engine, merged as they come."""

    def __init__(self, engines: EngineClient, model: str, request: InferRequest) -> None:
        self._engines = engines
        self._model = model
        self._request = request
        self.num_sequences = 1
        self._live: dict[LiveRequest, tuple[int, int]] = {}

    def start(self, samples: list[Sample], num_sequences: int, is_streaming: bool) -> None:
        """Submit every sequence of every sample.

        Raises:
            RequestError: the engine is not there; nothing is left running.
        """
        request = self._request
        self.num_sequences = num_sequences
        try:
            for index, sample in enumerate(samples):
                for sequence in range(num_sequences):
                    sampling = replace(sample.sampling, num_return_sequences=1)
                    live = self._engines.submit(
                        self._model,
                        prompt_ids=pack_ids(sample.prompt_ids),
                        sequence_index=sequence,
                        sampling=sampling.to_wire(),
                        priority=request.priority,
                        timeout_us=request.timeout_us,
                        streaming=is_streaming,
                        client_request_id=request.id,
                        arrival_ns=request.arrival_ns,
                    )
                    self._live[live] = (index, sequence)
        except BaseException:
            self.abandon()
            raise

    def cancel(self) -> None:
        """End every sequence with what it has."""
        for live in self._live:
            live.cancel()

    def cancel_sequence(self, sample: int, sequence: int) -> None:
        """End one sequence with what it has."""
        for live, place in self._live.items():
            if place == (sample, sequence):
                live.cancel()

    def abandon(self) -> None:
        """Nobody reads any more: end every sequence at the engine."""
        for live in self._live:
            live.abandon()

    async def chunks(self) -> AsyncGenerator[tuple[int, int, TokenChunk, bool], None]:
        """(sample, sequence, chunk, whether it is the last of all), as they come.

        Raises:
            RequestError: the engine refused or lost a sequence; the others are ended.
        """
        try:
            if len(self._live) == 1:
                ((live, (sample, sequence)),) = self._live.items()
                async with aclosing(live.chunks()) as chunks:
                    async for chunk in chunks:
                        yield sample, sequence, chunk, chunk.is_last
            else:
                async with aclosing(self._merged()) as merged:
                    async for item in merged:
                        yield item
        finally:
            self.abandon()

    async def _merged(self) -> AsyncGenerator[tuple[int, int, TokenChunk, bool], None]:
        queue: asyncio.Queue[tuple[int, int, TokenChunk] | BaseException] = asyncio.Queue()

        async def read(live: LiveRequest, sample: int, sequence: int) -> None:
            try:
                async with aclosing(live.chunks()) as chunks:
                    async for chunk in chunks:
                        queue.put_nowait((sample, sequence, chunk))
            except Exception as error:
                queue.put_nowait(error)

        readers = [asyncio.ensure_future(read(live, *at)) for live, at in self._live.items()]
        num_open = len(readers)
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                num_open -= item[2].is_last
                yield *item, num_open == 0
        finally:
            for reader in readers:
                reader.cancel()
            for reader in readers:
                with suppress(asyncio.CancelledError):
                    await reader
