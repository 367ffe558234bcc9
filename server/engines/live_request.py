"""One request that an engine runs, as the front end sees it: new tokens and beams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import FinishReason, Submit
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.token_ids import pack_ids, unpack_ids
from trimaran.server.engines.unread_logits import UnreadLogits, logits_bytes

PADDING = -1
"""Fills rows that are shorter than the longest beam."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beams:
    """The best outputs so far. A later one of the same request replaces it."""

    token_ids: list[list[int]]
    cum_log_probs: list[float]
    """Sums over each output, its end included."""

    scores: list[float]
    """``cum_log_probs`` divided by length ** length penalty: beams are ranked by these."""

    reasons: list[FinishReason]
    """NOT_FINISHED for a beam that still grows."""

    log_probs: list[list[float]]
    """One for each id; empty unless requested."""

    num_logits: list[int]
    """Rows of the accompanying logits that belong to each output."""

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Beams:
        """From the ``beams`` of a message's extras."""
        return cls(
            token_ids=[unpack_ids(raw).tolist() for raw in wire["ids"]],
            cum_log_probs=wire["cum_log_probs"],
            scores=wire["scores"],
            reasons=[FinishReason(reason) for reason in wire["reasons"]],
            log_probs=wire.get("log_probs", [[] for _ in wire["ids"]]),
            num_logits=wire.get("num_logits", [0] * len(wire["ids"])),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all beams together."""
        return sum(map(len, self.token_ids))


def padded(rows: Sequence[Sequence[float]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """[1, rows, longest]: rows of different lengths, padded."""
    table = np.full((1, len(rows), max(map(len, rows), default=0)), PADDING, dtype=dtype)
    for index, row in enumerate(rows):
        table[0, index, : len(row)] = row
    return table


def logits_by_beam(counts: Sequence[int], logits_NV: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[beams, most of ``counts``, V] of logits beam by beam; zeros behind shorter ones."""
    table = np.zeros((len(counts), max(counts), logits_NV.shape[1]), dtype=logits_NV.dtype)
    start = 0
    for index, count in enumerate(counts):
        table[index, :count] = logits_NV[start : start + count]
        start += count
    return table


def longest(wire: Mapping[str, Any]) -> int:
    """Tokens of the longest beam of a message's extras."""
    return max((len(raw) // 4 for raw in wire["ids"]), default=0)


_DEFAULT_MAX_TOKENS = SamplingParams().max_tokens
_OF_IDS = ("log_probs", "generation_logits")
"""The extras that have one item for each id."""
_CHUNK_LOGITS_BYTES = 1 << 18
"""Logits of one chunk of a stream: a slow reader has them in more chunks, because one answer
with all of them takes many times their size as JSON."""


@dataclass(slots=True)
class TokenChunk:
    """New ids of one sequence, from one step or, for a slow reader, from several."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NOT_FINISHED
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not FinishReason.NOT_FINISHED

    def beginning(self, num_ids: int) -> TokenChunk:
        """A chunk with only the first ``num_ids`` ids and their extras."""
        if num_ids == len(self.token_ids):
            return self
        extras = {
            name: value[:num_ids] if name in _OF_IDS else value
            for name, value in self.extras.items()
        }
        return replace(self, token_ids=self.token_ids[:num_ids], extras=extras)

    def singly(self) -> Iterator[TokenChunk]:
        """Chunks of one id each. The last chunk has the end, and the extras without a value for
        each id; the first chunk has the prompt's logits."""
        last = len(self.token_ids) - 1
        if last < 1 or "beams" in self.extras:
            yield self
            return
        others = {n: value for n, value in self.extras.items() if n not in _OF_IDS}
        prompt = {n: others.pop(n) for n in ("context_logits",) if n in others}
        for index, token_id in enumerate(self.token_ids):
            extras = {n: v[index : index + 1] for n, v in self.extras.items() if n in _OF_IDS}
            extras |= prompt if index == 0 else others if index == last else {}
            reason = self.finish_reason if index == last else FinishReason.NOT_FINISHED
            yield TokenChunk([token_id], reason, extras)

    def cut(self, num_ids: int) -> TokenChunk:
        """Keep the first ``num_ids`` ids. Returns the others, with the end if there is one."""
        per_id = {name: self.extras[name] for name in _OF_IDS if name in self.extras}
        others = {n: value for n, value in self.extras.items() if n != "context_logits"}
        others |= {name: value[num_ids:] for name, value in per_id.items()}
        rest = TokenChunk(self.token_ids[num_ids:], self.finish_reason, others)
        del self.token_ids[num_ids:]
        self.finish_reason = FinishReason.NOT_FINISHED
        self.extras |= {name: value[:num_ids] for name, value in per_id.items()}
        return rest

    def merge(
        self, token_ids: list[int], finish_reason: FinishReason, extras: dict[str, Any]
    ) -> None:
        """Add what a later step produced: lists grow, other extras are replaced."""
        self.token_ids += token_ids
        self.finish_reason = finish_reason
        for name, value in extras.items():
            if isinstance(value, list):
                self.extras.setdefault(name, []).extend(value)
            else:
                self.extras[name] = value


class LiveRequest:
    """A submitted request, read with `take` whenever it has news.

    Tokens that arrive between two reads are merged into one chunk, so that a slow reader
    costs memory for ids, and for logits within a limit. A reader of the whole answer
    (``submit.streaming`` is false) is notified once, at the end.
    """

    def __init__(
        self,
        submit: Submit,
        on_cancel: Callable[[LiveRequest], None],
        observe_gap: Callable[[float, int], None],
        on_context_done: Callable[[LiveRequest, float | None], None],
        unread: UnreadLogits,
    ) -> None:
        self.submit = submit
        self.max_tokens: int = submit.sampling.get("max_tokens", _DEFAULT_MAX_TOKENS)
        self.output_ids: list[int] = (
            unpack_ids(submit.output_ids).tolist() if submit.output_ids else []
        )
        """With those that the request began with. Empty for beam search, whose output may
        still change."""
        self.num_output_tokens = 0
        """Output tokens of all beams together."""
        self._beam_length = 0
        self._num_repeated = 0
        """Beam length up to which a replayed beam search produces nothing new."""
        self._has_prompt_logits = False
        self.context_tokens = 0
        """Tokens that the group has to prefill before the first new token."""
        self.num_deaths = 0
        self.is_over = False
        self._on_cancel = on_cancel
        self._observe_gap = observe_gap
        self._on_context_done = on_context_done
        self._unread = unread
        self._is_context_done = False
        self._pending: TokenChunk | None = None
        self._error: RequestError | None = None
        self.on_output: Callable[[], None] = _no_listener
        """Called when there is something to take."""
        self.answer: object = None
        """What all sequences of a client's request share; None: the request has this one."""
        self._last_token_s = 0.0
        self._arrived_s = submit.arrival_ns / 1e9 or time.monotonic()

    @property
    def request_id(self) -> int:
        """The id on the engine's connection."""
        return self.submit.request_id

    @property
    def num_left(self) -> int:
        """Tokens that may still come."""
        return self.max_tokens - len(self.output_ids)

    def replay_submit(self) -> Submit:
        """The message with which another engine continues this request."""
        self._is_context_done = False
        # Beam search keeps no output to continue from: it starts over, with equal results.
        self._num_repeated = self._beam_length
        return replace(self.submit, output_ids=pack_ids(self.output_ids))

    def push(self, ids: list[int], reason: FinishReason, extras: dict[str, Any]) -> None:
        """Take what one step produced."""
        if ids:
            self._measure(len(ids))
            self.output_ids += ids
            self.num_output_tokens += len(ids)
        is_over = reason is not FinishReason.NOT_FINISHED
        if "beams" in extras:
            if not is_over and 0 < longest(extras["beams"]) <= self._num_repeated:
                return
            self._take_beams(extras["beams"])
        if "context_logits" in extras:
            if self._has_prompt_logits:
                extras = {n: value for n, value in extras.items() if n != "context_logits"}
            self._has_prompt_logits = True
        chunk = self._pending
        if chunk is None:
            self._pending = TokenChunk(ids, reason, extras)
        else:
            chunk.merge(ids, reason, extras)
        self.is_over = is_over
        if is_over or self.submit.streaming:
            self.on_output()
        if not extras:
            return
        if not self.submit.streaming:
            num_bytes = logits_bytes(extras)
        else:
            # The prompt's logits are kept for every response of the stream.
            num_bytes = logits_bytes(extras, ("context_logits",))
            if self._pending is not None:
                self._hold_unread(self._pending.extras)
        if num_bytes:
            self._unread.hold_whole(self.answer or self, self, num_bytes)

    def fail(self, error: RequestError) -> None:
        """End with an error, after the tokens that are still unread."""
        self._error = error
        self.is_over = True
        self.on_output()

    def reject(self, error: RequestError) -> None:
        """End with an error here and at the engine."""
        if not self.is_over:
            self._on_cancel(self)
            self.fail(error)

    def cut_off(self, error: RequestError) -> None:
        """End with an error now; what is unread is dropped."""
        self._pending = None
        if not self.is_over:
            self._on_cancel(self)
        self.fail(error)

    def cancel(self) -> None:
        """End the request now; the last chunk has the reason CANCELLED. Idempotent."""
        if not self.is_over:
            self._on_cancel(self)
            self.push([], FinishReason.CANCELLED, {})

    def abandon(self) -> None:
        """End the request at the engine; no reader is left."""
        if not self.is_over:
            self._on_cancel(self)
            self.is_over = True
        # The listener refers to this request: what is unread would stay until the collector
        # comes, and logits are megabytes.
        self._pending = None
        self._unread.release(self.answer or self, self)
        self.answer = None
        self.on_output = _no_listener

    @property
    def has_output(self) -> bool:
        """Whether `take` has something to give."""
        if self._error is not None:
            return True
        return self._pending is not None and (self.submit.streaming or self.is_over)

    def take(self) -> TokenChunk:
        """The chunk since the last call; the last chunk has a finish reason.

        A stream's chunk has a limited size of logits: others may be left to take.

        Raises:
            RequestError: the engine refused or lost the request.
        """
        chunk, self._pending = self._pending, None
        if chunk is not None:
            if chunk.extras and self.submit.streaming:
                self._pending = _rest_of(chunk)
                left = {} if self._pending is None else self._pending.extras
                self._hold_unread(left)
            return chunk
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error
        finally:
            # The error's traceback refers to this frame and to those of the readers: the
            # tensors of their request would stay until the collector comes.
            del error

    def _hold_unread(self, extras: dict[str, Any]) -> None:
        self._unread.hold(self, logits_bytes(extras, ("generation_logits",)))

    def _take_beams(self, wire: dict[str, Any]) -> None:
        self.num_output_tokens = sum(len(ids) // 4 for ids in wire["ids"])
        length = longest(wire)
        if length > self._beam_length:
            self._measure(length - self._beam_length)
            self._beam_length = length

    def _measure(self, num_tokens: int) -> None:
        now = time.monotonic()
        if not self._is_context_done:
            self._is_context_done = True
            is_first = not self._last_token_s
            self._on_context_done(self, now - self._arrived_s if is_first else None)
        if self._last_token_s:
            self._observe_gap((now - self._last_token_s) / num_tokens, num_tokens)
        self._last_token_s = now


def _rest_of(chunk: TokenChunk) -> TokenChunk | None:
    """Cut a chunk where its logits have the size that one answer of a stream may have."""
    logits = chunk.extras.get("generation_logits")
    if not logits or "beams" in chunk.extras:
        return None
    num_ids = max(1, _CHUNK_LOGITS_BYTES // len(logits[0]))
    return chunk.cut(num_ids) if len(chunk.token_ids) > num_ids else None


def _no_listener() -> None:
    """Stands for a reader that has not attached yet."""
