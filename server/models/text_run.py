"""The answers of one text request: chunks of ids in, responses with text out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import FinishReason
from trimaran.server.engines.live_request import TokenChunk
from trimaran.server.engines.unread_logits import GatheredLogits, UnreadLogits
from trimaran.server.inference.request import InferRequest, InferResponse, Tensor
from trimaran.server.inference.tensor_bytes import object_array
from trimaran.server.metrics.measured_model import MeasuredModel
from trimaran.server.models.draft_rounds import TokenStep
from trimaran.server.models.encoded_texts import NO_IDS, Ids
from trimaran.server.models.graph_model import sequence_parameters
from trimaran.server.models.pending_requests import Arrivals
from trimaran.server.models.postprocessing import LastIdsJob
from trimaran.server.models.sample_inputs import SampleInputs, batch_size
from trimaran.server.models.sequence_outputs import STOPPED, Progress, SequenceOutputs
from trimaran.server.models.stop_text import StopText, StopWords, TextAnswer
from trimaran.server.models.token_job import ChunkResponse
from trimaran.server.models.tokenizer import INLINE_IDS, Tokenizer
from trimaran.server.models.transaction import num_responses

_FEW_IDS = 128
"""More ids of one chunk than these are not decoded one by one on the event loop."""


TOKEN_FROM_PREPROCESSING = {
    "input_ids": "INPUT_ID",
    "input_lengths": "REQUEST_INPUT_LEN",
    "decoder_input_ids": "DECODER_INPUT_ID",
    "decoder_input_lengths": "REQUEST_DECODER_INPUT_LEN",
    "request_output_len": "REQUEST_OUTPUT_LEN",
    "bad_words_list": "BAD_WORDS_IDS",
    "stop_words_list": "STOP_WORDS_IDS",
    "embedding_bias": "EMBEDDING_BIAS",
    "end_id": "OUT_END_ID",
    "pad_id": "OUT_PAD_ID",
    "prompt_table_extra_ids": "OUT_PROMPT_TABLE_EXTRA_IDS",
}
"""Token model's input to preprocessing's output, as the two roles fit together."""


@dataclass(frozen=True, slots=True)
class TensorMaps:
    """The routes of the text model's inputs: each step input to its source input."""

    preprocessing: Mapping[str, str]
    token: Mapping[str, str]
    token_from_preprocessing: Mapping[str, str]
    """Token model's input to preprocessing's output."""

    outputs: Mapping[str, str]
    """A step's output to the text model's output."""

    @property
    def text(self) -> str:
        """The text model's input with the prompt."""
        return self.preprocessing["QUERY"]


@dataclass(frozen=True, slots=True)
class Steps:
    """The three models of a pipeline, each counting its own requests."""

    preprocessing: MeasuredModel
    token: MeasuredModel
    postprocessing: MeasuredModel
    tokenizer: Tokenizer
    arrivals: Arrivals
    """The timing of the token model."""

    max_input_len: Callable[[], int | None]
    """Tokens of the engine's longest prompt; None as long as no engine was up."""

    unread_logits: UnreadLogits
    """The limit on the logits that answers keep."""

    facts: Callable[[], Mapping[str, Any]]
    """The engine's facts; a RequestError as long as no engine was up."""

    adapter_folder: str
    """The folder whose subfolders are adapters; empty without adapters."""

    skip_special_tokens: bool = True
    excludes_input: bool = False
    """Whether answers exclude the prompt by default."""
    has_own_preprocessing: bool = False
    """Whether user code makes the prompt, so that its text is decoded from its ids."""

    normalises_log_probs: bool = True
    """Whether a beam's log-probability is divided by its length, as its score is."""

    draft: TokenStep | None = None
    """The draft model."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Every id that ends an output by default: the tokenizer's, then those that the
        engine's files name."""
        try:
            of_engine = self.facts().get("end_ids", ())
        except RequestError:
            of_engine = ()
        return tuple(dict.fromkeys((*self.tokenizer.end_ids, *of_engine)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The differences between the text models."""

    name: str
    version: str
    config: ModelConfig
    is_batched: bool
    accumulates: bool = False
    """Whether each streamed response repeats the text so far."""
    is_ensemble: bool = False
    """Whether responses have an ensemble's parameters, and errors name the ensemble."""


class TextRun:
    """One request's answers by (sample, sequence)."""

    hides_stop_words = False
    """Whether a stop word is cut from the text that it ends."""

    def __init__(
        self,
        steps: Steps,
        maps: TensorMaps,
        options: PipelineOptions,
        request: InferRequest,
        token_inputs: dict[str, Tensor],
        stop_words: list[StopWords],
    ) -> None:
        self._steps = steps
        self._maps = maps
        self._options = options
        self._request = request
        self._token_inputs = token_inputs
        flags = SampleInputs(token_inputs, 0, options.is_batched)
        num_samples = batch_size(request.inputs, maps.text, options.is_batched)
        self._has_beams = (flags.scalar("beam_width") or 1) > 1
        num_sequences = num_responses(flags) or 1
        self._num_open = num_samples * num_sequences
        self._outputs = [
            SequenceOutputs(
                SampleInputs(token_inputs, index, options.is_batched),
                num_samples,
                num_sequences,
                options.config,
                normalises_log_probs=steps.normalises_log_probs,
            )
            for index in range(num_samples)
        ]
        self._is_streaming = flags.flag("streaming")
        self._stop_words = stop_words
        self._answers: dict[tuple[int, int], TextAnswer] = {}
        self._gathered = GatheredLogits(steps.unread_logits, self._drop_logits)
        self._parameters = sequence_parameters(request) if options.is_ensemble else {}
        """Parameters of every response; never changed."""

    @property
    def is_incremental(self) -> bool:
        """Whether ids are needed as they are generated: for streaming, or to find a stop
        word.
        """
        # A stop word ends one beam, not the search.
        return self._is_streaming or (any(self._stop_words) and not self._has_beams)

    def takes_at_once(self, response: InferResponse) -> bool:
        """Whether `take_at_once` will do: new ids of a sequence that goes on, without stop
        words and beams, few enough for the event loop. Most tokens of streams come so.
        """
        assert isinstance(response, ChunkResponse)
        chunk = response.chunk
        return (
            not chunk.is_last
            and len(chunk.token_ids) <= INLINE_IDS
            and not self._has_beams
            and not self._stop_words[response.sample]
        )

    def take_at_once(self, response: InferResponse) -> InferResponse | None:
        """The text response for this chunk, or None, of a chunk that `takes_at_once` found."""
        assert isinstance(response, ChunkResponse)
        key, chunk = (response.sample, response.sequence), response.chunk
        answer = self._answer(key)
        self._add(answer, chunk)
        delta = answer.push(chunk.token_ids)
        return self._one(key, answer, delta) if self._is_streaming and delta else None

    async def take(self, response: InferResponse) -> InferResponse | None:
        """The text response for this chunk, or None."""
        assert isinstance(response, ChunkResponse)
        key, chunk = (response.sample, response.sequence), response.chunk
        answer = self._answer(key)
        if answer.stop.is_matched:
            return None
        delta, ids = "", chunk.token_ids
        if self._stop_words[response.sample]:
            # Tokens of the same chunk behind the stop word are not counted.
            delta, num_ids = (
                answer.push_each(ids)
                if len(ids) <= _FEW_IDS
                else await self._steps.tokenizer.in_thread(partial(answer.push_each, ids))
            )
            chunk, ids = chunk.beginning(num_ids), []
        self._add(answer, chunk)
        if answer.progress.beams is not None:
            return await self._take_beams(key, answer, chunk)
        if not chunk.is_last:
            delta += (
                answer.push(ids)
                if len(ids) <= INLINE_IDS
                else await self._steps.tokenizer.in_thread(partial(answer.push, ids))
            )
        if chunk.is_last or answer.stop.is_matched:
            self._num_open -= 1
            delta += await self._last(answer, ids if chunk.is_last else [])
            if answer.stop.is_matched:
                answer.progress.finish_reason = STOPPED
            # A no-op if the engine has ended the sequence.
            response.end_sequence()
            is_stopped = chunk.finish_reason is FinishReason.CANCELLED
            has_output = delta or self._outputs[response.sample].tell_of_ends
            if is_stopped and self._is_streaming and not has_output:
                # A stopped stream ends with the final flag alone, unless outputs remain.
                return None
            return self._one(key, answer, delta, is_last=True)
        if self._is_streaming and delta:
            return self._one(key, answer, delta)
        return None

    def _add(self, answer: TextAnswer, chunk: TokenChunk) -> None:
        """Take in a chunk, whose logits may be kept until the answer is whole."""
        if chunk.extras and not chunk.is_last and self._keeps_logits:
            self._gathered.hold(chunk.extras)
        answer.progress.add(chunk)

    @property
    def _keeps_logits(self) -> bool:
        """Whether no response takes the logits of a chunk before the last one."""
        return not self._is_streaming

    def _drop_logits(self) -> None:
        for answer in self._answers.values():
            answer.progress.logits.clear()

    async def aclose(self) -> None:
        """No response is made any more."""
        self._gathered.release()

    async def _take_beams(
        self, key: tuple[int, int], answer: TextAnswer, chunk: TokenChunk
    ) -> InferResponse | None:
        """The whole texts of all beams, because beams may change."""
        self._num_open -= chunk.is_last
        is_stopped = chunk.finish_reason is FinishReason.CANCELLED
        has_output = "beams" in chunk.extras or self._outputs[key[0]].tell_of_ends
        if not has_output and is_stopped and self._is_streaming:
            return None
        if not (chunk.is_last or self._is_streaming):
            return None
        beams = answer.progress.beams
        assert beams is not None
        texts, reasons = [], []
        are_long = beams.num_tokens > INLINE_IDS
        for ids, reason in zip(beams.token_ids, beams.reasons, strict=True):
            one = self._new_answer(key[0])
            if are_long:
                # Others take their turn between two beams.
                await asyncio.sleep(0)
            texts.append(await self._last(one, ids) if chunk.is_last else one.push(ids))
            # The engine does not match stop words that other ids spell.
            reasons.append(FinishReason.STOP_WORDS if one.stop.is_matched else reason)
        answer.progress.beams = replace(beams, reasons=reasons)
        return self._response(key, answer, texts, is_last=chunk.is_last)

    async def _last(self, answer: TextAnswer, ids: list[int]) -> str:
        job = LastIdsJob(
            model_name=self._steps.postprocessing.name,
            parent=self._request,
            id=self._request.id,
            detokenizer=answer.detokenizer,
            ids=ids,
        )
        response = await self._steps.postprocessing.respond(job)
        rest = "" if response is None else response.outputs[0].data.flat[0].decode()
        return answer.finish(rest)

    def _excludes_input(self, sample: int) -> bool:
        inputs = SampleInputs(self._token_inputs, sample, self._options.is_batched)
        asked = inputs.scalar("exclude_input_in_output")
        return self._steps.excludes_input if asked is None else bool(asked)

    def _prompt(self, sample: int) -> str:
        """The text before a sample's answer."""
        steps = self._steps
        if steps.has_own_preprocessing:
            ids = self._prompt_ids(sample).tolist()
            return steps.tokenizer.decode(ids, steps.skip_special_tokens)
        return self._sample(sample).texts(self._maps.text)[0]

    def _prompt_ids(self, sample: int) -> Ids:
        inputs = SampleInputs(self._token_inputs, sample, self._options.is_batched)
        ids = inputs.array("input_ids")
        return NO_IDS if ids is None else ids.reshape(-1)[: inputs.scalar("input_lengths")]

    def _answer(self, key: tuple[int, int]) -> TextAnswer:
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = self._new_answer(key[0])
        return answer

    def _skips_special_tokens(self) -> bool:
        return self._steps.skip_special_tokens

    def _new_answer(self, sample: int) -> TextAnswer:
        ids = self._prompt_ids(sample)
        detokenizer = self._steps.tokenizer.detokenizer(ids, self._skips_special_tokens())
        stop = StopText(self._stop_words[sample], hides_word=self.hides_stop_words)
        return TextAnswer(detokenizer, stop, Progress(len(ids)))

    def _one(
        self, key: tuple[int, int], answer: TextAnswer, delta: str, *, is_last: bool = False
    ) -> InferResponse:
        """The response of a sequence without beams: the new text, or all text."""
        is_delta = self._is_streaming and not self._options.accumulates
        texts = [delta if is_delta else answer.text]
        return self._response(key, answer, texts, is_last=is_last)

    def _response(
        self,
        key: tuple[int, int],
        answer: TextAnswer,
        texts: list[str],
        *,
        is_last: bool = False,
    ) -> InferResponse:
        """``texts`` has one text for each beam, without the prompt."""
        if not self._is_streaming and not self._excludes_input(key[0]):
            prompt = self._prompt(key[0])
            texts = [prompt + text for text in texts]
        # As postprocessing answers: [beams], with no batch dimension.
        data = object_array([text.encode() for text in texts])
        outputs = [Tensor("OUTPUT", "BYTES", data)]
        others = self._outputs[key[0]]
        if others.has_any:
            more = others.tensors(*key, answer.progress, is_last=is_last)
            if not self._options.is_batched:
                more = [Tensor(o.name, o.datatype, o.data[0]) for o in more]
            outputs += more
        return InferResponse(
            model_name=self._options.name,
            model_version=self._options.version,
            id=self._request.id,
            outputs=self._chosen(outputs),
            parameters=self._parameters,
            is_final=self._num_open == 0,
        )

    def _chosen(self, outputs: list[Tensor]) -> list[Tensor]:
        """The requested outputs, renamed to the text model's outputs."""
        names, wanted = self._maps.outputs, self._request.outputs
        chosen = []
        for tensor in outputs:
            name = names.get(tensor.name)
            if name is not None and (not wanted or name in wanted):
                tensor.name = name
                chosen.append(tensor)
        return chosen

    def _sample(self, index: int) -> SampleInputs:
        return SampleInputs(self._request.inputs, index, self._options.is_batched)
