"""The rounds of one text request: tokens of a draft model, checked by the target model."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from trimaran.comm.errors import EngineDeadError, ErrorKind, RequestError
from trimaran.comm.messages.messages import FinishReason
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.server.engines.live_request import TokenChunk
from trimaran.server.inference.request import InferResponse, Tensor
from trimaran.server.metrics.measured_model import MeasuredModel
from trimaran.server.models.graph_model import prefixed
from trimaran.server.models.pending_requests import Arrivals
from trimaran.server.models.sample_inputs import SampleInputs
from trimaran.server.models.sampling_inputs import PERF_METRICS, read_sampling
from trimaran.server.models.sequence_outputs import LOGITS_DTYPES, logits_type
from trimaran.server.models.token_inputs import Drafts, draft_limit, is_seeded, max_draft_len
from trimaran.server.models.token_job import ChunkResponse, TokenJob
from trimaran.server.models.transaction import check_logits

NUM_DRAFT_TOKENS, USE_DRAFT_LOGITS = "num_draft_tokens", "use_draft_logits"
_LENGTHS = ("min_length", "min_tokens")
# Inputs that apply to the target model alone: further outputs, and an adapter of its layers.
_OF_TARGET = frozenset((
    *_LENGTHS, *PERF_METRICS, "return_log_probs", "output_log_probs", "return_context_logits",
    "return_generation_logits", "lora_task_id", "lora_name", "lora_weights", "lora_config",
))  # fmt: skip
_GENERATION_LOGITS = "generation_logits"
_GUIDES = frozenset(("guided_decoding_guide_type", "guided_decoding_guide"))
_LOGITS = "return_generation_logits"
_SUMS = ("total_draft_tokens", "total_accepted_draft_tokens")
_OF_FIRST = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns")


@dataclass(frozen=True, slots=True)
class TokenStep:
    """A token model that answers rounds."""

    model: MeasuredModel
    facts: Callable[[], Mapping[str, Any]]
    """The engine's facts; a RequestError as long as no engine was up."""


class DraftRounds:
    """Runs one sequence to its end. Stands for the `Measurement` of the target's request.

    Each round asks the draft model for some tokens, and the target model for the tokens that it
    chooses in their place: those that agree, and one more. Both requests continue the output so
    far, so that penalties, limits and draws are those of a request without drafts. The tokens
    are therefore those of such a request, whatever the drafts are. With logits of the draft
    model the tokens have the same distribution, and may be others.
    """

    responses: AsyncIterator[InferResponse]
    """`ChunkResponse`, one a round; several where the target model goes on alone."""

    def __init__(
        self,
        target: TokenStep,
        draft: TokenStep,
        arrivals: Arrivals,
        job: TokenJob,
        num_draft_tokens: int,
        *,
        uses_logits: bool = False,
    ) -> None:
        """``arrivals`` are those of the target model. With ``uses_logits`` the draft model's
        logits decide with the target's, where the request draws and has no seed.

        Raises:
            RequestError: the target's engine verifies fewer draft tokens, or none, or the
                answer cannot hold the logits that the request asks for.
        """
        self._target, self._draft, self._arrivals, self._job = target, draft, arrivals, job
        limit = draft_limit(job.parameters)
        if limit is not None:
            num_draft_tokens = min(num_draft_tokens, limit)
        self._num_draft_tokens = num_draft_tokens
        facts = target.facts()
        self._vocab_size = int(facts["vocab_size"])
        most = max_draft_len(facts)
        if num_draft_tokens > most:
            raise RequestError(
                f"{NUM_DRAFT_TOKENS} is {num_draft_tokens} but the engine of "
                f"'{target.model.name}' verifies at most {most} draft tokens. Ask for fewer, "
                "or build that engine with --speculative_decoding_mode "
                f"draft_tokens_external --max_draft_len {num_draft_tokens}."
            )
        inputs = SampleInputs(job.inputs, 0, target.model.is_batched)
        prompt = inputs.array("input_ids")
        length = inputs.scalar("input_lengths")
        size = 0 if prompt is None else prompt.size
        self._num_prompt = size if length is None else min(int(length), size)
        room = int(facts["max_seq_len"]) - self._num_prompt
        self._max_tokens = min(int(inputs.scalar("request_output_len") or 0), room)
        self._has_logits = False
        if uses_logits and not is_seeded(inputs):
            self._has_logits = not read_sampling(inputs, self._vocab_size).is_greedy
        if inputs.flag("return_generation_logits"):
            # A round checks its own tokens alone.
            self._check_logits(int(facts["max_seq_len"]))
        self._output: list[int] = []
        self._figures: dict[str, int] = {}
        """Sums over the rounds that are over."""
        self._is_ended = False

    def _check_logits(self, max_seq_len: int) -> None:
        sampling = SamplingParams(
            max_tokens=self._max_tokens,
            return_generation_logits=True,
            logits_dtype=LOGITS_DTYPES[logits_type(self._target.model.config)],
        )
        check_logits(
            sampling, self._num_prompt, self._vocab_size, max_seq_len, is_streaming=False
        )

    async def __aenter__(self) -> DraftRounds:
        self.responses = self._rounds()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.responses.aclose()  # type: ignore[attr-defined]

    def response(self, response: InferResponse) -> None:
        """Nothing: each round counts as a request of its models."""

    def cancelled(self) -> None:
        """Nothing: each round counts as a request of its models."""

    async def _rounds(self) -> AsyncGenerator[InferResponse, None]:
        # All the time: a stop request may come while no engine has the request.
        with self._arrivals.expect(self._job.id) as arrival:
            arrival.is_stopped = self._job.is_stopped
            while not self._is_ended:
                drafts = None if arrival.is_stopped else await self._drafted()
                job = self._verifying(drafts, is_stopped=arrival.is_stopped)
                async with aclosing(self._round(job)) as answers:
                    async for answer in answers:
                        yield answer

    async def _round(self, job: TokenJob) -> AsyncGenerator[InferResponse, None]:
        """The target model's answer to one request, or its start if a reader ends that."""
        async with self._target.model.measure(job) as measure:
            async for response in measure.responses:
                measure.response(response)
                assert isinstance(response, ChunkResponse)
                yield self._answer(response.chunk)
                if self._is_ended:
                    break

    def _answer(self, chunk: TokenChunk) -> ChunkResponse:
        """The response for ids of the target model; only the last one ends the sequence."""
        self._output += chunk.token_ids
        figures = chunk.extras.get("figures")
        if figures is not None:
            figures = self._sum(figures)
            chunk = replace(chunk, extras={**chunk.extras, "figures": figures})
            if chunk.is_last:
                self._figures = figures
        is_over = self._is_over(chunk)
        if chunk.is_last and not is_over:
            chunk = replace(chunk, finish_reason=FinishReason.NOT_FINISHED)
        self._is_ended = is_over
        return ChunkResponse(
            model_name=self._target.model.name,
            model_version=self._target.model.version,
            id=self._job.id,
            is_final=is_over,
            chunk=chunk,
            end_sequence=partial(setattr, self, "_is_ended", True),
        )

    def _is_over(self, chunk: TokenChunk) -> bool:
        """Whether the sequence has ended, and not a round alone."""
        has_room = len(self._output) < self._max_tokens and bool(chunk.token_ids)
        is_full = chunk.finish_reason is not FinishReason.LENGTH or not has_room
        return chunk.is_last and is_full

    async def _drafted(self) -> Drafts | None:
        """Ids of the draft model that may follow the output; None if no more fit into that
        model, or, since an earlier round, its engine is gone or too busy to answer."""
        facts, num_known = self._draft.facts(), self._num_prompt + len(self._output)
        room = int(facts["max_seq_len"]) - num_known
        if self._num_prompt > int(facts["max_input_len"]):
            room = 0
        left = self._max_tokens - len(self._output) - 1
        count = min(self._num_draft_tokens, left, room)
        if count < 1:
            return None
        num_tokens = len(self._output) + count
        inputs = {n: each for n, each in self._job.inputs.items() if n not in _OF_TARGET}
        inputs["request_output_len"] = self._number("request_output_len", num_tokens)
        if _GUIDES.isdisjoint(inputs):
            inputs["min_length"] = self._number("min_length", num_tokens)
        elif not facts.get("serves_guides"):
            # The target model keeps what the guide allows.
            inputs = {name: each for name, each in inputs.items() if name not in _GUIDES}
        if self._has_logits:
            inputs[_LOGITS] = self._input(_LOGITS, "BOOL", np.bool_(True))
        try:
            chunk = await self._one(self._draft.model, self._inner(inputs))
        except RequestError as error:
            # An error would lose the output so far.
            if self._output and error.kind is ErrorKind.UNAVAILABLE:
                return None
            if isinstance(error, EngineDeadError):
                raise
            raise prefixed(f"draft model '{self._draft.model.name}': ", error) from error
        ids = chunk.token_ids
        # The vocabularies of two models of a family may be padded differently.
        unknown = next((i for i, each in enumerate(ids) if each >= self._vocab_size), len(ids))
        logits = b""
        if self._has_logits and unknown:
            logits = _logits_of(chunk, unknown, self._vocab_size)
        return Drafts((*self._output, *ids[:unknown]), logits=logits, ends_after=True)

    def _verifying(self, drafts: Drafts | None, *, is_stopped: bool) -> TokenJob:
        """The request for the ids of the target model in place of the drafts, and one more;
        without drafts for all further ids."""
        num_tokens = self._max_tokens
        if drafts is not None:
            num_tokens = min(num_tokens, len(drafts.token_ids) + 1)
        inputs = dict(self._job.inputs)
        inputs["request_output_len"] = self._number("request_output_len", num_tokens)
        job = self._inner(inputs)
        job.model_name = self._target.model.name
        job.is_stopped = is_stopped
        job.has_begun = bool(self._output)
        # All further ids may be many behind a stop word that the text alone shows.
        job.is_incremental = drafts is None and self._job.is_incremental
        if not self._output:
            job.arrival_ns = self._job.arrival_ns
        if drafts is not None and len(drafts.token_ids) > len(self._output):
            job.drafts = drafts
        return job

    def _inner(self, inputs: dict[str, Tensor]) -> TokenJob:
        """A request that continues the output so far."""
        now = time.monotonic_ns()
        return replace(
            self._job,
            inputs=inputs,
            outputs=(),
            arrival_ns=now,
            handed_ns=now,
            timeout_us=0 if self._output else self._job.timeout_us,
            started_ns=0,
            executed_batch=None,
            is_incremental=False,
            output_ids=tuple(self._output),
        )

    async def _one(self, model: MeasuredModel, job: TokenJob) -> TokenChunk:
        """The only answer to a request that is answered at its end."""
        job.model_name = model.name
        whole = TokenChunk()
        async with model.measure(job) as measure:
            async for response in measure.responses:
                measure.response(response)
                assert isinstance(response, ChunkResponse)
                chunk = response.chunk
                whole.merge(chunk.token_ids, chunk.finish_reason, chunk.extras)
        return whole

    def _number(self, name: str, value: int) -> Tensor:
        return self._input(name, "INT32", np.int32(value))

    def _input(self, name: str, datatype: str, value: np.generic) -> Tensor:
        shape = (1, 1) if self._target.model.is_batched else (1,)
        return Tensor(name, datatype, np.full(shape, value))

    def _sum(self, figures: Mapping[str, int]) -> dict[str, int]:
        """A round's figures with those of earlier rounds: sums of drafts, times from the first
        to the last round, and the blocks of the last round."""
        before, sums = self._figures, dict(figures)
        for name in _SUMS:
            sums[name] = before.get(name, 0) + figures.get(name, 0)
        for name in _OF_FIRST:
            if name in before:
                sums[name] = before[name]
        return sums


def _logits_of(chunk: TokenChunk, count: int, vocab_size: int) -> bytes:
    """float32 [count, vocab_size]: the logits of a draft model's first ids. Ids that the draft
    model does not have cannot be drawn from them."""
    dtype = np.dtype(chunk.extras.get("logits_dtype", "float32"))
    found = np.full((count, vocab_size), -np.inf, "<f4")
    for row, raw in zip(found, chunk.extras[_GENERATION_LOGITS], strict=False):
        logits = np.frombuffer(raw, dtype)[:vocab_size]
        row[: len(logits)] = logits
    return found.tobytes()
