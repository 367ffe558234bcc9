"""The token-level model: ids in, ids out, as tensors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.server.engines.live_request import TokenChunk
from trimaran.server.engines.model_engines import ModelEngines
from trimaran.server.engines.unread_logits import UnreadLogits
from trimaran.server.inference.queue_policy import QueuePolicy
from trimaran.server.inference.request import InferRequest, InferResponse
from trimaran.server.models.pending_requests import Arrivals, Gathering
from trimaran.server.models.sample_inputs import SampleInputs, batch_size
from trimaran.server.models.sampling_inputs import check_request_type, read_sampling
from trimaran.server.models.sequence_outputs import LOGITS_DTYPES, logits_type
from trimaran.server.models.text_limits import check_prompt_length
from trimaran.server.models.token_answers import (
    Answers,
    BatchAnswers,
    ChunkAnswers,
    TensorAnswers,
)
from trimaran.server.models.token_inputs import (
    Drafts,
    add_digests,
    cache_key,
    read_adapter,
    read_drafts,
    read_retention,
    read_table,
    salted,
)
from trimaran.server.models.token_job import (
    OneSequence,
    OneStream,
    Sample,
    TokenJob,
    TokenStream,
    check_copies,
)
from trimaran.server.models.transaction import (
    check_equal,
    check_logits,
    check_transaction,
    num_responses,
    texts_of,
)
from trimaran.server.repository.model_repository import RepositoryModel
from trimaran.server.repository.signatures import answers_batches, returns_every_beam

_LARGE_BYTES = 256 << 10
"""Larger inputs are read in a thread: word lists, tables and adapters."""


class TokenModel:
    """A model of the token role, answered by its engine groups."""

    def __init__(
        self,
        model: RepositoryModel,
        version: int,
        engines: ModelEngines,
        *,
        clamps_ids: bool = False,
    ) -> None:
        """With ``clamps_ids``, an id of a prompt outside the vocabulary becomes its first or
        last id, and an ``end_id`` beyond the vocabulary ends nothing; otherwise the request is
        refused.
        """
        self.name = model.name
        self.version = str(version)
        self.config: ModelConfig = model.config
        self.is_decoupled = bool(model.config.model_transaction_policy.decoupled)
        """Whether a request may have other than one response."""
        self.answers_batches = answers_batches(model.config)
        """Whether a request has one response for all its samples."""
        self._texts = texts_of(model.config.backend)
        self._engines = engines
        self._clamps_ids = clamps_ids
        self._returns_every_beam = returns_every_beam(model.config)
        engines.on_stop = self._stop_here
        self._is_batched = model.config.max_batch_size > 0
        self.excludes_input = model.parameters.get_bool("exclude_input_in_output") or False
        """Whether answers exclude the prompt by default."""
        normalises = model.parameters.get_bool("normalize_log_probs")
        self.normalises_log_probs = True if normalises is None else normalises
        """Whether a beam's log-probability is divided by its length, as its score is."""
        self.adapter_folder = model.parameters.get_str("lora_prefetch_dir") or ""
        """The folder whose subfolders are adapters; empty without adapters."""
        self._policy = QueuePolicy(model.config)
        self._gathering = Gathering(model.config)
        self._logits_dtype = LOGITS_DTYPES[logits_type(model.config)]
        self._running: dict[str, set[TokenStream | OneStream]] = {}
        self.arrivals = Arrivals()
        """Requests of text models whose prompts are being tokenized: stop requests may overtake
        them.
        """

    @property
    def is_ready(self) -> bool:
        """Whether a worker group is up."""
        return self._engines.is_ready

    def facts(self) -> Mapping[str, Any]:
        """The engine's facts.

        Raises:
            RequestError: no engine was up yet.
        """
        return self._engines.facts()

    @property
    def unread_logits(self) -> UnreadLogits:
        """The limit on the logits of all answers of the front end."""
        return self._engines.unread_logits

    @property
    def vocab_size(self) -> int | None:
        """Size of the engine's vocabulary; None before an engine was up."""
        try:
            return int(self._engines.facts()["vocab_size"])
        except RequestError:
            return None

    @property
    def max_input_len(self) -> int | None:
        """Tokens of the longest prompt; None as long as no engine was up."""
        try:
            return _longest_prompt(self._engines.facts())
        except RequestError:
            return None

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Run one request; see `inference.Model`."""
        first = SampleInputs(request.inputs, 0, self._is_batched)
        if first.flag("stop"):
            self._stop(request.id)
            # Decoupled too: clients print that the stop was answered.
            yield InferResponse(
                model_name=self.name,
                model_version=self.version,
                id=request.id,
                is_final=True,
            )
            return
        # First of all: stop requests may come while the request is read in a thread.
        stream = TokenStream(self._engines, request)
        self._running.setdefault(request.id, set()).add(stream)
        if isinstance(request, TokenJob) and request.is_stopped:
            stream.cancel()
        try:
            samples = await self._read(request)
            num_sequences = num_responses(first)
            self._check(request, first, samples, num_sequences)
            answers, is_incremental = self._answers(request, samples, stream, num_sequences)
            await add_digests([sample.adapter for sample in samples])
            if not (isinstance(request, TokenJob) and request.output_ids):
                # A request that goes on with its output waited before its first token.
                await self._gathering.join(len(samples))
            stream.start(samples, num_sequences, self._policy, is_incremental=is_incremental)
            while not stream.is_over:
                if not stream.poll():
                    await stream.output()
                    continue
                for response in _taken(answers, stream):
                    yield response
        finally:
            stream.abandon()
            self._forget(request.id, stream)

    async def _read(self, request: InferRequest) -> list[Sample]:
        """The samples of a request, read off the event loop where that takes long."""
        if sum(t.data.nbytes for t in request.inputs.values()) > _LARGE_BYTES:
            return await asyncio.to_thread(self._samples, request)
        return self._samples(request)

    def _check(
        self,
        request: InferRequest,
        first: SampleInputs,
        samples: list[Sample],
        num_sequences: int,
    ) -> None:
        """Refuse what samples may not ask for together.

        Raises:
            RequestError: names the input.
        """
        check_equal(request.inputs, "beam_width", "num_return_sequences", "streaming")
        check_transaction(
            self.is_decoupled,
            1 if self.answers_batches else len(samples),
            num_sequences,
            first.flag("streaming"),
            self._texts,
        )
        check_copies(samples, num_sequences)

    async def run_one(self, request: InferRequest, one: OneSequence) -> TokenChunk:
        """All ids of a checked request of one sequence, without the generator of `infer`.
        Cancelling the caller's task cancels the request.

        Raises:
            RequestError: the engine is down, or refused or lost the request.
        """
        stream = await self.start_one(request, one, is_incremental=False)
        try:
            chunk = await stream.next()
            # Behind ids without an end there is an error, which the next call raises.
            return chunk if chunk.is_last else await stream.next()
        finally:
            self.end_one(request, stream)

    async def start_one(
        self, request: InferRequest, one: OneSequence, *, is_incremental: bool
    ) -> OneStream:
        """Send a checked request of one sequence. The caller ends it by `end_one`.

        Raises:
            RequestError: the engine is down.
        """
        stream = OneStream()
        self._running.setdefault(request.id, set()).add(stream)
        try:
            await self._gathering.join(1)
            stream.start(
                self._engines, request, one, self._policy, is_incremental=is_incremental
            )
        except BaseException:
            self.end_one(request, stream)
            raise
        return stream

    def end_one(self, request: InferRequest, stream: OneStream) -> None:
        """End a request of `start_one`, at the engine too."""
        stream.abandon()
        self._forget(request.id, stream)

    def _answers(
        self,
        request: InferRequest,
        samples: list[Sample],
        stream: TokenStream,
        num_sequences: int,
    ) -> tuple[Answers, bool]:
        """The maker of the responses, and whether it needs ids as they are generated."""
        if isinstance(request, TokenJob):
            return ChunkAnswers(self, request, stream), request.is_incremental
        if self.answers_batches:
            max_seq_len = int(self._engines.facts()["max_seq_len"])
            whole = BatchAnswers(
                self,
                request,
                samples,
                excludes_input=self.excludes_input,
                max_seq_len=max_seq_len,
            )
            return whole, False
        answers = TensorAnswers(
            self,
            request,
            samples,
            num_sequences,
            excludes_input=self.excludes_input,
            normalises_log_probs=self.normalises_log_probs,
        )
        return answers, answers.is_streaming

    def _stop(self, request_id: str) -> None:
        if not request_id:
            raise RequestError(self._texts.no_stop_id)
        self._stop_here(request_id)
        self._engines.stop(request_id)

    def _stop_here(self, request_id: str) -> None:
        """End the requests of this id that came to this front end."""
        for stream in list(self._running.get(request_id, ())):
            stream.cancel()
        self.arrivals.stop(request_id)

    def _forget(self, request_id: str, stream: TokenStream | OneStream) -> None:
        streams = self._running.get(request_id, set())
        streams.discard(stream)
        if not streams:
            self._running.pop(request_id, None)

    # ---- request ------------------------------------------------------------------------

    def _samples(self, request: InferRequest) -> list[Sample]:
        if "input_ids" not in request.inputs:
            raise RequestError(
                "input_ids or encoder_input_features is not present in the request."
            )
        check_request_type(request.parameters)
        facts = self._engines.facts()
        vocab_size = int(facts["vocab_size"])
        count = batch_size(request.inputs, "input_ids", self._is_batched)
        samples: list[Sample] = []
        for index in range(count):
            inputs = SampleInputs(request.inputs, index, self._is_batched)
            sampling = read_sampling(
                inputs, vocab_size, self._logits_dtype, clamps=self._clamps_ids
            )
            sampling = _with_beams(sampling, inputs, returns_all=self._returns_every_beam)
            if isinstance(request, TokenJob) and request.end_ids:
                sampling = _with_ends(sampling, request.end_ids, vocab_size)
            table = read_table(inputs, request.inputs.get("prompt_embedding_table"))
            num_entries = 0 if table is None else table["shape"][0]
            prompt = _prompt(inputs, facts, num_entries, clamps=self._clamps_ids)
            check_logits(
                sampling,
                len(prompt),
                vocab_size,
                int(facts["max_seq_len"]),
                is_streaming=inputs.flag("streaming"),
            )
            key = cache_key(inputs, len(prompt), table)
            key = salted(request.parameters, key)
            adapter = read_adapter(inputs, request.inputs)
            retention = read_retention(inputs)
            output_ids, drafts = _drafts(request, inputs, facts)
            samples.append(
                Sample(prompt, sampling, table, key, retention, *adapter, output_ids, drafts)
            )
        return samples


def _drafts(
    request: InferRequest, inputs: SampleInputs, facts: Mapping[str, Any]
) -> tuple[Sequence[int], Drafts]:
    """The output so far, and the drafts behind it."""
    if isinstance(request, TokenJob) and (request.output_ids or request.drafts.token_ids):
        return request.output_ids, request.drafts
    return (), read_drafts(inputs, request.parameters, facts)


def _taken(answers: Answers, stream: TokenStream) -> Iterator[InferResponse]:
    """The responses to what a stream has now; see `TokenStream.take`."""
    for sample, sequence, chunk, is_end in stream.take():
        for part in answers.parts(chunk):
            response = answers.take(sample, sequence, part, is_end and part.is_last)
            if response is not None:
                yield response


def _with_beams(
    sampling: SamplingParams, inputs: SampleInputs, *, returns_all: bool
) -> SamplingParams:
    """The beam search, with as many beams returned as requested: by default all. With
    ``returns_all`` a request for one sequence gets all of them too.
    """
    width = sampling.beam_width
    if width < 2:
        return sampling
    count = inputs.scalar("num_return_sequences")
    has_all = count is None or (returns_all and count == 1)
    return replace(sampling, num_return_sequences=width if has_all else int(count))


def _with_ends(
    sampling: SamplingParams, end_ids: Iterable[int], vocab_size: int
) -> SamplingParams:
    ids = [each for each in end_ids if each < vocab_size and each != sampling.end_id]
    # A copy takes longer than reading all parameters, and most models have one end id.
    return replace(sampling, end_ids=tuple(ids)) if ids else sampling


def _longest_prompt(facts: Mapping[str, Any]) -> int:
    """Most tokens of a prompt; a place is left for the first output token."""
    return min(int(facts["max_input_len"]), int(facts["max_seq_len"]) - 1)


def _prompt(
    inputs: SampleInputs, facts: dict[str, object], num_table_entries: int, *, clamps: bool
) -> list[int]:
    array = inputs.array("input_ids")
    ids = np.empty(0, np.int32) if array is None else array.reshape(-1)
    length = inputs.scalar("input_lengths")
    if length is not None:
        if clamps:
            # The warm-up of identity_test.py sends one prompt with the lengths of others.
            length = min(length, ids.size)
        if not 0 <= length <= ids.size:
            raise RequestError(
                f"input_lengths is {length} but must be between 0 and {ids.size}, the number "
                "of input_ids"
            )
        ids = ids[:length]
    if not ids.size:
        raise RequestError("the prompt is empty: input_ids must hold at least one token")
    check_prompt_length(ids.size, _longest_prompt(facts))
    vocab_size = int(str(facts["vocab_size"])) + num_table_entries
    low, high = int(ids.min()), int(ids.max())
    if clamps:
        ids = ids.clip(0, vocab_size - 1)
    elif low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(
            f"token id {bad} of input_ids is outside the vocabulary of {vocab_size} ids"
            + (
                f", {num_table_entries} of the prompt table among them"
                * bool(num_table_entries)
            )
        )
    found: list[int] = ids.tolist()
    return found
