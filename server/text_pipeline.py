"""Text in, text out: tokenize, generate, detokenize as ids arrive."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np

from trimaran.comm.errors import EngineDeadError, RequestError
from trimaran.comm.messages import FinishReason
from trimaran.server.detokenizer import IncrementalDetokenizer
from trimaran.server.inference import InferRequest, InferResponse, Model, ParameterValue, Tensor
from trimaran.server.live_request import TokenChunk
from trimaran.server.postprocessing import LastIdsJob
from trimaran.server.sample_inputs import SampleInputs
from trimaran.server.stop_text import StopText
from trimaran.server.text_answer import TextAnswer
from trimaran.server.token_job import ChunkResponse, TokenJob
from trimaran.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TensorMaps:
    """Where the text model's inputs go: each target input to the input it is read from."""

    preprocessing: Mapping[str, str]
    token: Mapping[str, str]
    token_from_preprocessing: Mapping[str, str]
    """Token model's input to preprocessing's output."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The three models of a pipeline, each counting its own requests."""

    preprocessing: Model
    token: Model
    postprocessing: Model
    tokenizer: Tokenizer
    skip_special_tokens: bool = True


@dataclass(slots=True, kw_only=True)
class PipelineOptions:
    """What differs between the text models."""

    name: str
    version: str
    is_batched: bool
    excludes_input: bool = False
    accumulates: bool = False
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    """Response parameters of every response."""


class TextPipeline:
    """Runs text requests over three step models; any number of them at once."""

    def __init__(self, steps: Steps, maps: TensorMaps, options: PipelineOptions) -> None:
        self._steps = steps
        self._maps = maps
        self._options = options

    @property
    def is_ready(self) -> bool:
        """Whether every step could run now."""
        steps = self._steps
        return all(m.is_ready for m in (steps.preprocessing, steps.token, steps.postprocessing))

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Run one request; see `inference.Model`."""
        token_inputs = await self._token_inputs(request)
        job = TokenJob(
            model_name=self._steps.token.name,
            id=request.id,
            inputs=token_inputs,
            parameters=request.parameters,
            priority=request.priority,
            timeout_us=request.timeout_us,
            arrival_ns=request.arrival_ns,
        )
        run = _Run(self._steps, self._options, request, token_inputs)
        async with aclosing(self._steps.token.infer(job)) as responses:  # type: ignore[type-var]
            async for response in responses:
                assert isinstance(response, ChunkResponse)
                answer = await run.take(response)
                if answer is not None:
                    yield answer

    async def _token_inputs(self, request: InferRequest) -> dict[str, Tensor]:
        maps = self._maps
        inputs = _renamed(request.inputs, maps.preprocessing)
        # Text stop words are matched on the text, where tokens cannot hide them.
        inputs.pop("STOP_WORDS_DICT", None)
        pre_request = InferRequest(
            model_name=self._steps.preprocessing.name, id=request.id, inputs=inputs
        )
        pre_outputs: dict[str, Tensor] = {}
        stream = self._steps.preprocessing.infer(pre_request)
        async with aclosing(stream) as responses:  # type: ignore[type-var]
            async for response in responses:
                pre_outputs = {tensor.name: tensor for tensor in response.outputs}
        token_inputs = _renamed(request.inputs, maps.token)
        token_inputs.update(_renamed(pre_outputs, maps.token_from_preprocessing))
        return token_inputs


class _Run:
    """One request's answers by (sample, sequence)."""

    def __init__(
        self,
        steps: Steps,
        options: PipelineOptions,
        request: InferRequest,
        token_inputs: dict[str, Tensor],
    ) -> None:
        self._steps = steps
        self._options = options
        self._request = request
        self._token_inputs = token_inputs
        self._first = SampleInputs(request.inputs, 0, options.is_batched)
        self._is_streaming = self._first.flag("stream", "streaming")
        text = request.inputs["text_input"]
        self._num_samples = int(text.shape[0]) if options.is_batched else 1
        self._num_sequences = self._first.scalar("num_return_sequences") or 1
        self._answers: dict[tuple[int, int], TextAnswer] = {}
        self._num_open = self._num_samples * self._num_sequences
        excludes = self._first.scalar("exclude_input_in_output")
        self._excludes_input = options.excludes_input if excludes is None else bool(excludes)

    @property
    def is_over(self) -> bool:
        """Whether every sequence has ended, by the engine or by a stop word."""
        return self._num_open == 0

    async def take(self, response: ChunkResponse) -> InferResponse | None:
        """The text response that this chunk makes, if it makes one."""
        key = (response.sample, response.sequence)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = self._new_answer(response.sample)
        if answer.stop.is_matched:
            return None
        chunk = response.chunk
        if chunk.is_last:
            delta = answer.push([]) + await self._last(answer, chunk)
        else:
            delta = answer.push(chunk.token_ids)
        is_last = chunk.is_last or answer.stop.is_matched
        if is_last and not chunk.is_last:
            response.end_sequence()
        self._num_open -= is_last
        if not is_last and (not self._is_streaming or not delta):
            return None
        if self._is_streaming and chunk.finish_reason is FinishReason.CANCELLED and not delta:
            return None
        return self._response(key, answer, delta)

    async def _last(self, answer: TextAnswer, chunk: TokenChunk) -> str:
        answer.num_ids += len(chunk.token_ids)
        job = LastIdsJob(
            model_name=self._steps.postprocessing.name,
            id=self._request.id,
            detokenizer=answer.detokenizer,
            ids=chunk.token_ids,
        )
        rest = ""
        stream = self._steps.postprocessing.infer(job)
        async with aclosing(stream) as responses:  # type: ignore[type-var]
            async for response in responses:
                rest = response.outputs[0].data.flat[0].decode()
        return answer.finish(rest)

    def _new_answer(self, sample: int) -> TextAnswer:
        options = self._options
        prompt = SampleInputs(self._token_inputs, sample, options.is_batched)
        ids = prompt.ids("input_ids")[: prompt.scalar("input_lengths")]
        own = SampleInputs(self._request.inputs, sample, options.is_batched)
        detokenizer = IncrementalDetokenizer(
            self._steps.tokenizer, ids, self._steps.skip_special_tokens
        )
        return TextAnswer(detokenizer, StopText(tuple(own.texts("stop_words"))))

    def _response(self, key: tuple[int, int], answer: TextAnswer, delta: str) -> InferResponse:
        text = delta
        if not self._is_streaming:
            text = answer.text
            if not self._excludes_input:
                own = SampleInputs(self._request.inputs, key[0], self._options.is_batched)
                text = own.texts("text_input")[0] + text
        elif self._options.accumulates:
            text = answer.text
        outputs = [Tensor("text_output", "BYTES", np.array([[text.encode()]], dtype=object))]
        for name, value in self._scalars(key, answer):
            outputs.append(Tensor(name, "INT32", np.array([[value]], dtype=np.int32)))
        if not self._options.is_batched:
            for tensor in outputs:
                tensor.data = tensor.data[0]
        wanted = self._request.outputs
        return InferResponse(
            model_name=self._options.name,
            model_version=self._options.version,
            id=self._request.id,
            outputs=[o for o in outputs if not wanted or o.name in wanted],
            parameters=dict(self._options.parameters),
            is_final=self.is_over,
        )

    def _scalars(self, key: tuple[int, int], answer: TextAnswer) -> list[tuple[str, int]]:
        values = []
        if self._num_samples > 1:
            values.append(("batch_index", key[0]))
        if self._num_sequences > 1:
            values.append(("sequence_index", key[1]))
        if self._first.flag("return_num_input_tokens"):
            prompt = SampleInputs(self._token_inputs, key[0], self._options.is_batched)
            values.append(("num_input_tokens", int(prompt.scalar("input_lengths"))))
        if self._first.flag("return_num_output_tokens"):
            values.append(("num_output_tokens", answer.num_ids))
        return values


def _renamed(tensors: Mapping[str, Tensor], sources: Mapping[str, str]) -> dict[str, Tensor]:
    return {
        target: Tensor(target, tensors[source].datatype, tensors[source].data)
        for target, source in sources.items()
        if source in tensors
    }


def prefixed(prefix: str, error: RequestError) -> RequestError:
    """The same error with a prefix, as a composed model reports it."""
    text = f"{prefix}{error}"
    if isinstance(error, EngineDeadError):
        return EngineDeadError(text)
    return RequestError(text, error.kind)
