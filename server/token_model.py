"""The token-level model: ids in, ids out, as tensors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages import FinishReason
from trimaran.server.engine_client import EngineClient
from trimaran.server.inference import InferRequest, InferResponse, Tensor
from trimaran.server.live_request import TokenChunk
from trimaran.server.model_repository import RepositoryModel
from trimaran.server.sample_inputs import SampleInputs, batch_size
from trimaran.server.sampling_inputs import read_sampling
from trimaran.server.token_job import ChunkResponse, Sample, TokenJob, TokenStream

NOT_DECOUPLED = "Streaming is only supported if model is deployed using decoupled mode."
BATCH_NOT_DECOUPLED = (
    "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"
)


class TokenModel:
    """A model of the token role, answered by the engine groups of its name."""

    def __init__(self, model: RepositoryModel, version: int, engines: EngineClient) -> None:
        self.name = model.name
        self.version = str(version)
        self.config: ModelConfig = model.config
        self._engines = engines
        self._is_batched = model.config.max_batch_size > 0
        self._excludes_input = model.parameters.get_bool("exclude_input_in_output") or False
        self._running: dict[str, set[TokenStream]] = {}

    @property
    def is_ready(self) -> bool:
        """Whether a worker group is up."""
        return self._engines.is_ready(self.name)

    @property
    def is_decoupled(self) -> bool:
        """Whether a request may have other than one response."""
        return bool(self.config.model_transaction_policy.decoupled)

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Run one request; see `inference.Model`."""
        first = SampleInputs(request.inputs, 0, self._is_batched)
        if first.flag("stop"):
            self._stop(request.id)
            if not self.is_decoupled:
                yield self._response(request, [], True)
            return
        samples = self._samples(request)
        is_streaming = first.flag("streaming")
        num_sequences = first.scalar("num_return_sequences") or 1
        self._check_policy(len(samples), num_sequences, is_streaming)
        stream = TokenStream(self._engines, self.name, request)
        stream.start(samples, num_sequences, is_streaming)
        self._running.setdefault(request.id, set()).add(stream)
        try:
            answers = _Answers(self, request, samples, stream, is_streaming)
            async with aclosing(stream.chunks()) as chunks:
                async for sample, sequence, chunk, is_end in chunks:
                    response = answers.take(sample, sequence, chunk, is_end)
                    if response is not None:
                        yield response
        finally:
            stream.abandon()
            self._forget(request.id, stream)

    def _stop(self, request_id: str) -> None:
        if not request_id:
            raise RequestError("Trying to stop a request but request ID is not provided")
        for stream in list(self._running.get(request_id, ())):
            stream.cancel()

    def _forget(self, request_id: str, stream: TokenStream) -> None:
        streams = self._running.get(request_id, set())
        streams.discard(stream)
        if not streams:
            self._running.pop(request_id, None)

    def _check_policy(self, num_samples: int, num_sequences: int, is_streaming: bool) -> None:
        if num_sequences < 1:
            raise RequestError(
                f"num_return_sequences is {num_sequences} but must be at least 1"
            )
        if self.is_decoupled:
            return
        if is_streaming:
            raise RequestError(NOT_DECOUPLED)
        if num_samples > 1:
            raise RequestError(BATCH_NOT_DECOUPLED)
        if num_sequences > 1:
            raise RequestError(
                f"num_return_sequences is {num_sequences}, which requires the decoupled "
                "transaction policy"
            )

    # ---- request ------------------------------------------------------------------------

    def _samples(self, request: InferRequest) -> list[Sample]:
        if "input_ids" not in request.inputs:
            raise RequestError(
                "input_ids or encoder_input_features is not present in the request."
            )
        facts = self._engines.facts(self.name)
        count = batch_size(request.inputs, "input_ids", self._is_batched)
        samples = []
        for index in range(count):
            inputs = SampleInputs(request.inputs, index, self._is_batched)
            sampling = read_sampling(inputs)
            sampling.validate(int(facts["vocab_size"]))
            ids = inputs.ids("input_ids")[: inputs.scalar("input_lengths")]
            _check_prompt(ids, facts)
            samples.append(Sample(ids, sampling))
        return samples

    def _response(
        self, request: InferRequest, outputs: list[Tensor], is_final: bool
    ) -> InferResponse:
        wanted = request.outputs
        return InferResponse(
            model_name=self.name,
            model_version=self.version,
            id=request.id,
            outputs=[o for o in outputs if not wanted or o.name in wanted],
            is_final=is_final,
        )


class _Answers:
    """Turns chunks of one request into responses: at once if it streams, else at the end."""

    def __init__(
        self,
        model: TokenModel,
        request: InferRequest,
        samples: list[Sample],
        stream: TokenStream,
        is_streaming: bool,
    ) -> None:
        self._model = model
        self._request = request
        self._samples = samples
        self._is_streaming = is_streaming
        self._stream = stream
        first = SampleInputs(request.inputs, 0, model._is_batched)
        excludes = first.scalar("exclude_input_in_output")
        self._excludes_input = model._excludes_input if excludes is None else bool(excludes)
        self._flags = tuple(
            name
            for name in ("num_input_tokens", "num_output_tokens")
            if first.flag(f"return_{name}")
        )
        self._ids: dict[tuple[int, int], list[int]] = {}

    def take(
        self, sample: int, sequence: int, chunk: TokenChunk, is_end: bool
    ) -> InferResponse | None:
        """The response that this chunk makes, if it makes one."""
        if isinstance(self._request, TokenJob):
            return ChunkResponse(
                model_name=self._model.name,
                model_version=self._model.version,
                id=self._request.id,
                is_final=is_end,
                sample=sample,
                sequence=sequence,
                chunk=chunk,
                end_sequence=partial(self._stream.cancel_sequence, sample, sequence),
            )
        so_far = self._ids.setdefault((sample, sequence), [])
        so_far += chunk.token_ids
        if self._is_streaming:
            ids = chunk.token_ids
            # A stopped stream ends with the flag alone.
            if not ids and chunk.finish_reason is FinishReason.CANCELLED:
                return None
        elif not chunk.is_last:
            return None
        else:
            prompt = [] if self._excludes_input else self._samples[sample].prompt_ids
            ids = prompt + so_far
        outputs = self._tensors(sample, sequence, ids, len(so_far), chunk)
        return self._model._response(self._request, outputs, is_end)

    def _tensors(
        self, sample: int, sequence: int, ids: list[int], num_output: int, chunk: TokenChunk
    ) -> list[Tensor]:
        outputs = [
            Tensor("output_ids", "INT32", np.array([[ids]], dtype=np.int32)),
            Tensor("sequence_length", "INT32", np.array([[len(ids)]], dtype=np.int32)),
        ]
        scalars: list[tuple[str, int]] = []
        if len(self._samples) > 1:
            scalars.append(("batch_index", sample))
        if self._stream.num_sequences > 1:
            scalars.append(("sequence_index", sequence))
        counts = (len(self._samples[sample].prompt_ids), num_output)
        scalars += [
            (name, count)
            for name, count in zip(
                ("num_input_tokens", "num_output_tokens"), counts, strict=True
            )
            if name in self._flags
        ]
        outputs += [
            Tensor(name, "INT32", np.array([[value]], dtype=np.int32))
            for name, value in scalars
        ]
        if not self._model._is_batched:
            for tensor in outputs:
                tensor.data = tensor.data[0]
        wanted = self._request.outputs
        if wanted and not {"output_ids", "sequence_length"} <= set(wanted):
            raise RequestError(
                "output_ids and sequence_length must be present in the list of output tensors",
                ErrorKind.INVALID_ARG,
            )
        return outputs


def _check_prompt(ids: list[int], facts: dict[str, object]) -> None:
    if not ids:
        raise RequestError("the prompt is empty: input_ids must hold at least one token")
    limit = int(str(facts["max_input_len"]))
    if len(ids) > limit:
        raise RequestError(
            f"Prompt length ({len(ids)}) exceeds maximum input length ({limit}). Shorten the "
            "prompt, or build the engine with a larger --max-input-len."
        )
    vocab_size = int(str(facts["vocab_size"]))
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(
            f"token id {bad} of input_ids is outside the vocabulary of {vocab_size} ids"
        )
