"""Text in, text out: tokenize, generate, detokenize as ids arrive, cut at stop words."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial

from trimaran.comm.errors import RequestError
from trimaran.comm.word_automaton import WordAutomaton
from trimaran.server.inference.request import (
    InferRequest,
    InferResponse,
    Tensor,
)
from trimaran.server.inference.text_limits import PromptBound
from trimaran.server.metrics.measured_model import Measurement
from trimaran.server.models.draft_rounds import (
    NUM_DRAFT_TOKENS,
    USE_DRAFT_LOGITS,
    DraftRounds,
    TokenStep,
)
from trimaran.server.models.graph_model import prefixed, sequence_parameters
from trimaran.server.models.preprocessing import PROMPTS, WORDS, PromptJob
from trimaran.server.models.sample_inputs import SampleInputs, batch_size
from trimaran.server.models.sampling_inputs import check_words
from trimaran.server.models.stop_text import MANY_WORDS, StopWords, read_stop_words
from trimaran.server.models.text_request import TextRequest, TextRequestRun
from trimaran.server.models.text_run import (
    TOKEN_FROM_PREPROCESSING,
    PipelineOptions,
    Steps,
    TensorMaps,
    TextRun,
)
from trimaran.server.models.token_inputs import draft_limit
from trimaran.server.models.token_job import TokenJob

_JOB_NAMES = {"QUERY": "prompt", "STOP_WORDS_DICT": "stop"}
"""What clients of jobs call the inputs of preprocessing."""


class TextPipeline:
    """Runs text requests over three step models; any number of them at once.

    Stop words are matched twice: as ids by the engine, where special tokens are visible, and
    as text after detokenization, where a word may be spelled by other tokens.
    """

    def __init__(self, steps: Steps, maps: TensorMaps, options: PipelineOptions) -> None:
        self._steps = steps
        self._maps = maps
        self._options = options
        self._to_preprocessing = _targets(maps.preprocessing)
        self._to_token = _targets(maps.token)
        self._from_preprocessing = _targets(maps.token_from_preprocessing)

    @property
    def steps(self) -> Steps:
        """The models that the pipeline runs."""
        return self._steps

    @property
    def maps(self) -> TensorMaps:
        """The routes of the text model's inputs and outputs."""
        return self._maps

    @property
    def options(self) -> PipelineOptions:
        """What tells the text model from others."""
        return self._options

    def adopt(self, request: TextRequest) -> TextRequest:
        """A text request as a request of this pipeline, which its model counts."""
        request.model_name = self._options.name
        is_batched = self._options.is_batched
        request.inputs = request.prompt_tensors(self._maps.text, is_batched=is_batched)
        return request

    @property
    def is_ready(self) -> bool:
        """Whether every step could run now."""
        steps = self._steps
        return (
            steps.preprocessing.is_ready
            and steps.token.is_ready
            and steps.postprocessing.is_ready
        )

    @property
    def prompt_bound(self) -> PromptBound | None:
        """See `PromptModel`."""
        steps, options = self._steps, self._options
        if steps.has_own_preprocessing:
            return None
        renamed = self._maps.preprocessing
        return PromptBound(
            steps.tokenizer.limits,
            tuple(renamed[name] for name in PROMPTS if name in renamed),
            steps.max_input_len(),
            f"in ensemble '{options.name}', " if options.is_ensemble else "",
            tuple(renamed[name] for name in WORDS if name in renamed),
        )

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Run one request; see `inference.Model`."""
        try:
            is_text_request = isinstance(request, TextRequest)
            if not is_text_request and asks_to_stop(
                request, self._maps, is_batched=self._options.is_batched
            ):
                async with aclosing(self._stop(request)) as stopped:
                    async for nothing in stopped:
                        yield nothing
                return
            job, run = await self._prepare(request)
            async with self._tokens(request, job) as token, aclosing(run):
                async for response in token.responses:
                    token.response(response)
                    try:
                        answer = (
                            run.take_at_once(response)
                            if run.takes_at_once(response)
                            else await run.take(response)
                        )
                    except BaseException:
                        # The token model did not fail: its request was abandoned.
                        token.cancelled()
                        raise
                    if answer is not None:
                        yield answer
        except RequestError as error:
            if not self._options.is_ensemble:
                raise
            raise prefixed(f"in ensemble '{self._options.name}', ", error) from error

    def _tokens(self, request: InferRequest, job: TokenJob) -> Measurement | DraftRounds:
        """The token model's answers, alone or with a draft model."""
        steps, asked = self._steps, SampleInputs(request.inputs, 0, self._options.is_batched)
        count = int(asked.scalar(NUM_DRAFT_TOKENS) or 0) if steps.draft is not None else 0
        if steps.draft is None or count < 1 or draft_limit(job.parameters) == 0:
            return steps.token.measure(job)
        target = TokenStep(steps.token, steps.facts)
        uses_logits = asked.flag(USE_DRAFT_LOGITS)
        return DraftRounds(
            target, steps.draft, steps.arrivals, job, count, uses_logits=uses_logits
        )

    async def _prepare(self, request: InferRequest) -> tuple[TokenJob, TextRun]:
        """Run preprocessing: the request to the token model, and the maker of its answers."""
        is_text_request = isinstance(request, TextRequest)
        with self._steps.arrivals.expect(request.id) as arrival:
            if isinstance(request, TextRequest):
                token_inputs = await self._text_request_inputs(request)
                words = WordAutomaton(request.stop_words)
                stop_words = [words] * len(request.prompts)
            else:
                token_inputs = await self._token_inputs(request)
                stop_words = await self._stop_words(request)
        make = TextRequestRun if is_text_request else TextRun
        run = make(self._steps, self._maps, self._options, request, token_inputs, stop_words)
        job = TokenJob(
            model_name=self._steps.token.name,
            id=request.id,
            inputs=token_inputs,
            parameters=request.parameters,
            priority=request.priority,
            timeout_us=request.timeout_us,
            arrival_ns=request.arrival_ns,
            handed_ns=time.monotonic_ns(),
            parent=request,
            is_incremental=run.is_incremental,
            end_ids=self._end_ids(request),
            is_stopped=arrival.is_stopped,
        )
        return job, run

    def _end_ids(self, request: InferRequest) -> tuple[int, ...]:
        """The ids that end the output if the request names none itself."""
        if self._steps.has_own_preprocessing:
            return ()
        if isinstance(request, TextRequest):
            names_own = request.ignores_end
        else:
            names_own = self._maps.preprocessing.get("END_ID", "") in request.inputs
        return () if names_own else self._steps.end_ids

    async def _stop(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """End the requests of this id; the answer has no outputs."""
        token = self._steps.token
        inputs = {"stop": request.inputs[self._maps.token["stop"]]}
        stop = InferRequest(model_name=token.name, id=request.id, inputs=inputs)
        async with aclosing(token.infer(stop)) as responses:  # type: ignore[type-var]
            async for response in responses:
                yield InferResponse(
                    model_name=self._options.name,
                    model_version=self._options.version,
                    id=request.id,
                    parameters=sequence_parameters(request)
                    if self._options.is_ensemble
                    else {},
                    is_final=response.is_final,
                )

    async def _token_inputs(self, request: InferRequest) -> dict[str, Tensor]:
        pre_request = PromptJob(
            model_name=self._steps.preprocessing.name,
            id=request.id,
            inputs=_renamed(request.inputs.values(), self._to_preprocessing),
            parent=request,
            max_input_len=self._steps.max_input_len(),
        )
        try:
            response = await self._steps.preprocessing.respond(pre_request)
        except RequestError as error:
            raise _in_own_names(error, self._maps.preprocessing) from error
        outputs = [] if response is None else response.outputs
        token_inputs = _renamed(request.inputs.values(), self._to_token)
        token_inputs.update(_renamed(outputs, self._from_preprocessing))
        return token_inputs

    async def _text_request_inputs(self, request: TextRequest) -> dict[str, Tensor]:
        is_batched = self._options.is_batched
        pre_request = PromptJob(
            model_name=self._steps.preprocessing.name,
            id=request.id,
            inputs=request.preprocessing_inputs(is_batched=is_batched),
            parent=request,
            max_input_len=self._steps.max_input_len(),
            add_special_tokens=request.add_special_tokens,
            prompt_ids=request.prompt_ids,
        )
        try:
            response = await self._steps.preprocessing.respond(pre_request)
        except RequestError as error:
            raise _in_own_names(error, _JOB_NAMES) from error
        assert response is not None
        # By the preprocessing model's own wires: an ensemble may leave some of these out.
        return {
            **_renamed(response.outputs, _TO_TOKEN),
            **request.token_inputs(is_batched=is_batched),
        }

    async def _stop_words(self, request: InferRequest) -> list[StopWords]:
        """The stop words of each sample."""
        name = self._maps.preprocessing.get("STOP_WORDS_DICT", "")
        is_batched = self._options.is_batched
        num_samples = batch_size(request.inputs, self._maps.text, is_batched)
        num_words = check_words(request.inputs, name)
        read = partial(
            read_stop_words, request.inputs, name, num_samples, is_batched=is_batched
        )
        return read() if num_words <= MANY_WORDS else await asyncio.to_thread(read)


def asks_to_stop(request: InferRequest, maps: TensorMaps, *, is_batched: bool) -> bool:
    """Whether a request only stops the other requests of its id."""
    if isinstance(request, TextRequest):
        return False
    return SampleInputs(request.inputs, 0, is_batched).flag(maps.token.get("stop", ""))


def _in_own_names(error: RequestError, sources: Mapping[str, str]) -> RequestError:
    """A step's error, with the input names of the text model in place of the step's."""
    text = re.sub(
        r"(?<=input ')[^']+(?=')", lambda named: sources.get(named[0], named[0]), str(error)
    )
    return RequestError(text, error.kind)


def _targets(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The inputs that each source goes to, from the source of each input."""
    targets: dict[str, list[str]] = {}
    for target, source in sources.items():
        targets.setdefault(source, []).append(target)
    return targets


_TO_TOKEN = _targets(TOKEN_FROM_PREPROCESSING)


def _renamed(
    tensors: Iterable[Tensor], targets: Mapping[str, Sequence[str]]
) -> dict[str, Tensor]:
    return {
        target: Tensor(target, tensor.datatype, tensor.data)
        for tensor in tensors
        for target in targets.get(tensor.name, ())
    }
