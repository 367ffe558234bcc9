"""A parsed token-level request: its samples, and the merged stream of their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.server.engines.live_request import LiveRequest, TokenChunk
from trimaran.server.engines.model_engines import ModelEngines
from trimaran.server.inference.queue_policy import QueuePolicy
from trimaran.server.inference.request import InferRequest, InferResponse
from trimaran.server.models.token_inputs import NO_DRAFTS, Drafts


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt of a request."""

    prompt_ids: list[int]
    sampling: SamplingParams
    prompt_table: dict[str, Any] | None = None
    """The field ``embeddings`` of `Submit`."""

    cache_key: bytes = b""
    """Prompts share KV cache blocks only with equal ids and equal keys."""

    retention: dict[str, Any] | None = None
    """The field ``retention`` of `Submit`."""

    adapter_id: int = 0
    adapter: dict[str, Any] | None = None
    """The fields ``adapter_id`` and ``adapter`` of `Submit`."""

    output_ids: Sequence[int] = ()
    """Ids of the output so far, behind which the engine goes on."""

    drafts: Drafts = NO_DRAFTS

    @property
    def num_bytes(self) -> int:
        """What each sequence of the sample sends to its engine, about."""
        sampling, num_ids = self.sampling, len(self.prompt_ids) + len(self.drafts.token_ids)
        for words in (sampling.stop_words, sampling.bad_words):
            num_ids += sum(map(len, words))
        parts = [(self.adapter or {}).get(name) for name in ("weights", "config")]
        data = [part["data"] for part in (self.prompt_table, *parts) if part is not None]
        num_bytes = len(sampling.embedding_bias) + len(sampling.guide) + sum(map(len, data))
        num_bytes += len(self.drafts.logits)
        return num_bytes + _ID_BYTES * num_ids


_ID_BYTES = 4
MAX_COPIED_BYTES = 64 << 20
"""Most bytes that a request of several sequences sends to its engine."""


def check_copies(samples: Sequence[Sample], num_sequences: int) -> None:
    """Refuse sequences that together send too much to an engine: each is a request there.

    Raises:
        RequestError: names the bytes, the limit and the remedy.
    """
    if num_sequences < 2:
        return
    num_bytes = sum(sample.num_bytes for sample in samples)
    if num_bytes * num_sequences > MAX_COPIED_BYTES:
        raise RequestError(
            f"num_return_sequences is {num_sequences}, and each sequence needs the {num_bytes} "
            "bytes of the request's prompts, words, biases, tables and adapters, but together "
            f"these may be at most {MAX_COPIED_BYTES}. Ask for fewer sequences, or shorten "
            "these inputs."
        )


@dataclass(slots=True)
class OneSequence:
    """A prompt with one sequence, without tensors."""

    prompt_ids: bytes
    """As in `Submit`."""

    sampling: dict[str, Any]
    """`SamplingParams.to_wire()`."""

    cache_key: bytes = b""


class OneStream:
    """The sequence of `OneSequence` at the engine."""

    __slots__ = ("_is_cancelled", "_live", "_timer", "_waiter")

    def __init__(self) -> None:
        self._live: LiveRequest | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_cancelled = False

    def start(
        self,
        engines: ModelEngines,
        request: InferRequest,
        one: OneSequence,
        policy: QueuePolicy,
        *,
        is_incremental: bool,
    ) -> None:
        """Submit the sequence. With ``is_incremental`` chunks come as tokens do, otherwise one
        chunk at the end.

        Raises:
            RequestError: the engine is down.
        """
        live = self._live = engines.submit(
            prompt_ids=one.prompt_ids,
            sampling=one.sampling,
            cache_salt=one.cache_key,
            priority=policy.priority(request),
            streaming=is_incremental,
            client_request_id=request.id,
            arrival_ns=request.arrival_ns,
        )
        live.on_output = self._wake
        timeout_s = policy.timeout_s(request)
        if timeout_s:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout_s, reject_waiting, live)
        if self._is_cancelled:
            live.cancel()

    def cancel(self) -> None:
        """End the sequence with its tokens so far; before `start` there are none."""
        self._is_cancelled = True
        if self._live is not None:
            self._live.cancel()

    def abandon(self) -> None:
        """End the sequence at the engine; no reader is left."""
        if self._timer is not None:
            self._timer.cancel()
        if self._live is not None:
            self._live.abandon()

    async def next(self) -> TokenChunk:
        """The ids since the last call. The chunk with the end may be empty.

        Raises:
            RequestError: the engine refused or lost the sequence.
        """
        live = self._live
        assert live is not None
        if not live.has_output:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return live.take()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def reject_waiting(live: LiveRequest) -> None:
    """End a request that has no token after its longest wait."""
    if not live.num_output_tokens:
        live.reject(RequestError("Request timeout expired", ErrorKind.UNAVAILABLE))


@dataclass(slots=True, kw_only=True)
class TokenJob(InferRequest):
    """A token-level request of a text model in this process.

    The token model counts it like any request but answers with `ChunkResponse`, without tensors
    for every token.
    """

    is_incremental: bool = True
    """Whether chunks are wanted as they come, or one chunk at the end."""

    end_ids: tuple[int, ...] = ()
    """Ids that end the output beside the input ``end_id``; those outside the vocabulary are
    ignored."""

    is_stopped: bool = False
    """Whether the client stopped the request while its prompt was tokenized."""

    output_ids: Sequence[int] = ()
    """Ids of the output so far, behind which the only sample's only sequence goes on."""

    drafts: Drafts = NO_DRAFTS
    """Those of the only sample, checked."""

    has_begun: bool = False
    """Whether an engine has answered a part of the request: it waits for an engine that
    restarts, and for its next token as long as that takes."""


@dataclass(slots=True, kw_only=True)
class ChunkResponse(InferResponse):
    """New ids of one sequence instead of tensors."""

    sample: int = 0
    sequence: int = 0
    chunk: TokenChunk = field(default_factory=TokenChunk)
    end_sequence: Callable[[], None]
    """Ends this sequence at the engine, because its text contains a stop word."""


class TokenStream:
    """All sequences of one request at the engine, merged as tokens arrive.

    A reader that is slower than the engine gets fewer and longer chunks.
    """

    def __init__(self, engines: ModelEngines, request: InferRequest) -> None:
        self._engines = engines
        self._request = request
        self._live: dict[tuple[int, int], LiveRequest] = {}
        self._unfinished: dict[tuple[int, int], LiveRequest] = {}
        """Sequences whose last chunk was not taken yet."""
        self._ready: list[tuple[int, int]] = []
        self._is_cancelled = False
        self._waiter: asyncio.Future[None] | None = None
        self._timeout: asyncio.TimerHandle | None = None

    def start(
        self,
        samples: list[Sample],
        num_sequences: int,
        policy: QueuePolicy,
        *,
        is_incremental: bool,
    ) -> None:
        """Submit every sequence of every sample.

        Raises:
            RequestError: the engine is down; no sequence is left running.
        """
        request = self._request
        has_begun = isinstance(request, TokenJob) and request.has_begun
        try:
            for index, sample in enumerate(samples):
                for sequence in range(num_sequences):
                    sampling = sample.sampling
                    if sampling.beam_width == 1 and sampling.num_return_sequences != 1:
                        sampling = replace(sampling, num_return_sequences=1)
                    live = self._engines.submit(
                        prompt_ids=pack_ids(sample.prompt_ids),
                        output_ids=pack_ids(sample.output_ids) if sample.output_ids else b"",
                        sequence_index=sequence,
                        sampling=sampling.to_wire(),
                        embeddings=sample.prompt_table,
                        cache_salt=sample.cache_key,
                        retention=sample.retention,
                        adapter_id=sample.adapter_id,
                        adapter=sample.adapter,
                        draft_token_ids=sample.drafts.token_ids,
                        draft_acceptance_threshold=sample.drafts.acceptance_threshold,
                        draft_logits=sample.drafts.logits,
                        lookahead=sample.drafts.lookahead,
                        max_draft_tokens=sample.drafts.max_draft_tokens,
                        ends_after_drafts=sample.drafts.ends_after,
                        has_begun=has_begun,
                        priority=policy.priority(request),
                        streaming=is_incremental,
                        client_request_id=request.id,
                        arrival_ns=request.arrival_ns,
                    )
                    live.on_output = self._wake
                    live.answer = self
                    self._live[index, sequence] = live
        except BaseException:
            self.abandon()
            raise
        self._unfinished = dict(self._live)
        if self._is_cancelled:
            self.cancel()
        # The limit is one of the first token, which an earlier part of the answer has brought.
        timeout_s = 0.0 if has_begun else policy.timeout_s(request)
        if timeout_s:
            loop = asyncio.get_running_loop()
            self._timeout = loop.call_later(timeout_s, self._expire)

    def cancel(self) -> None:
        """End every sequence with its tokens so far; before `start` there are none."""
        self._is_cancelled = True
        for live in self._live.values():
            live.cancel()

    def cancel_sequence(self, sample: int, sequence: int) -> None:
        """End one sequence with its tokens so far."""
        self._live[sample, sequence].cancel()

    def abandon(self) -> None:
        """End every sequence at the engine; no reader is left."""
        if self._timeout is not None:
            self._timeout.cancel()
        for live in self._live.values():
            live.abandon()

    @property
    def is_over(self) -> bool:
        """Whether the last chunk of every sequence was taken."""
        return not self._unfinished

    def poll(self) -> bool:
        """Whether there are chunks to `take` now."""
        self._ready = [key for key, live in self._unfinished.items() if live.has_output]
        return bool(self._ready)

    def output(self) -> asyncio.Future[None]:
        """Resolves at the next chunk of any sequence. One reader at a time may wait."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def take(self) -> Iterator[tuple[int, int, TokenChunk, bool]]:
        """(sample, sequence, chunk, whether it is the last of all) of each sequence that had
        news at the last `poll`. A chunk is taken when the iterator reaches its sequence, so
        that it includes tokens that came meanwhile.

        Raises:
            RequestError: the engine refused or lost a sequence.
        """
        return map(self._taken, self._ready)

    def _taken(self, key: tuple[int, int]) -> tuple[int, int, TokenChunk, bool]:
        chunk = self._unfinished[key].take()
        if chunk.is_last:
            del self._unfinished[key]
        return *key, chunk, not self._unfinished

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _expire(self) -> None:
        for live in self._live.values():
            reject_waiting(live)
