"""The rounds of one text request: tokens of a draft model, checked by the target model."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from trimaran.comm.errors import EngineDeadError, RequestError
from trimaran.comm.messages.messages import FinishReason
from trimaran.server.engines.live_request import TokenChunk
from trimaran.server.inference.request import InferResponse, Tensor
from trimaran.server.metrics.measured_model import MeasuredModel
from trimaran.server.models.graph_model import prefixed
from trimaran.server.models.pending_requests import Arrivals
from trimaran.server.models.sample_inputs import SampleInputs
from trimaran.server.models.sampling_inputs import PERF_METRICS
from trimaran.server.models.token_inputs import Drafts, max_draft_len
from trimaran.server.models.token_job import ChunkResponse, TokenJob

NUM_DRAFT_TOKENS = "num_draft_tokens"
_LENGTHS = ("min_length", "min_tokens")
# Inputs that apply to the target model alone: further outputs, and an adapter of its layers.
_OF_TARGET = frozenset((
    *_LENGTHS, *PERF_METRICS, "return_log_probs", "output_log_probs", "return_context_logits",
    "return_generation_logits", "lora_task_id", "lora_name", "lora_weights", "lora_config",
))  # fmt: skip
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
    are therefore those of such a request, whatever the drafts are.
    """

    responses: AsyncIterator[InferResponse]
    """One `ChunkResponse` a round."""

    def __init__(
        self,
        target: TokenStep,
        draft: TokenStep,
        arrivals: Arrivals,
        job: TokenJob,
        num_draft_tokens: int,
    ) -> None:
        """``arrivals`` are those of the target model.

        Raises:
            RequestError: the target's engine verifies fewer draft tokens, or none.
        """
        self._target, self._draft, self._arrivals, self._job = target, draft, arrivals, job
        self._num_draft_tokens = num_draft_tokens
        facts = target.facts()
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
        self._vocab_size = int(facts["vocab_size"])
        self._output: list[int] = []
        self._figures: dict[str, int] = {}
        self._is_ended = False

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
        while not self._is_ended:
            with self._arrivals.expect(self._job.id) as arrival:
                drafts = await self._drafted()
            chunk = await self._verified(drafts, is_stopped=arrival.is_stopped)
            self._output += chunk.token_ids
            is_over = self._is_over(chunk)
            if not is_over:
                chunk = replace(chunk, finish_reason=FinishReason.NOT_FINISHED)
            self._is_ended = is_over
            yield ChunkResponse(
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
        return chunk.finish_reason is not FinishReason.LENGTH or not has_room

    async def _drafted(self) -> tuple[int, ...] | None:
        """Ids of the draft model that may follow the output; None if no more fit into that
        model, or its engine is gone since an earlier round."""
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
        inputs["min_length"] = self._number("min_length", num_tokens)
        try:
            chunk = await self._one(self._draft.model, self._inner(inputs))
        except EngineDeadError:
            if not self._output:
                raise
            return None
        except RequestError as error:
            raise prefixed(f"draft model '{self._draft.model.name}': ", error) from error
        ids = chunk.token_ids
        # The vocabularies of two models of a family may be padded differently.
        unknown = next((i for i, each in enumerate(ids) if each >= self._vocab_size), len(ids))
        return tuple(ids[:unknown])

    async def _verified(
        self, drafts: tuple[int, ...] | None, *, is_stopped: bool
    ) -> TokenChunk:
        """The ids of the target model in place of the drafts, and one more; without drafts all
        further ids."""
        num_tokens = self._max_tokens
        if drafts is not None:
            num_tokens = min(num_tokens, len(self._output) + len(drafts) + 1)
        inputs = dict(self._job.inputs)
        inputs["request_output_len"] = self._number("request_output_len", num_tokens)
        job = self._inner(inputs)
        job.is_stopped = is_stopped or self._job.is_stopped
        job.has_begun = bool(self._output)
        if not self._output:
            job.arrival_ns, job.timeout_us = self._job.arrival_ns, self._job.timeout_us
        if drafts:
            job.drafts = Drafts((*self._output, *drafts), ends_after=True)
        chunk = await self._one(self._target.model, job)
        figures = chunk.extras.get("figures")
        if figures is None:
            return chunk
        self._add(figures)
        return replace(chunk, extras={**chunk.extras, "figures": dict(self._figures)})

    def _inner(self, inputs: dict[str, Tensor]) -> TokenJob:
        """A request that continues the output so far."""
        now = time.monotonic_ns()
        return replace(
            self._job,
            inputs=inputs,
            outputs=(),
            arrival_ns=now,
            handed_ns=now,
            timeout_us=0,
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
        shape = (1, 1) if self._target.model.is_batched else (1,)
        return Tensor(name, "INT32", np.full(shape, value, np.int32))

    def _add(self, figures: Mapping[str, int]) -> None:
        """Add a round's figures: sums of drafts, times from the first to the last round, and
        the blocks of the last round."""
        before, self._figures = self._figures, dict(figures)
        for name in _SUMS:
            self._figures[name] = before.get(name, 0) + figures.get(name, 0)
        for name in _OF_FIRST:
            if name in before:
                self._figures[name] = before[name]
