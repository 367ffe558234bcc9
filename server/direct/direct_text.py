"""Runs plain text requests: a prompt's ids to the engine, the answer's ids to text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from trimaran.comm.errors import RequestError
from trimaran.server.direct.plain_request import PlainReader, PlainRequest
from trimaran.server.engines.live_request import TokenChunk
from trimaran.server.inference.request import InferRequest, InferResponse, Model, Tensor
from trimaran.server.inference.tensor_bytes import object_array
from trimaran.server.metrics.measured_model import MeasuredModel
from trimaran.server.models.graph_model import prefixed, sequence_parameters
from trimaran.server.models.sequence_outputs import REASONS
from trimaran.server.models.text_models import native_pipeline
from trimaran.server.models.token_model import TokenModel
from trimaran.server.models.tokenizer import INLINE_IDS


@dataclass(slots=True)
class PlainAnswer:
    """The answer to a plain request."""

    text: str
    """With the prompt in front, unless the request excludes the prompt."""

    token_ids: list[int]
    finish_reason: str
    num_input: int
    figures: Mapping[str, int] = field(default_factory=dict)
    """The engine's figures, if asked for."""


class DirectText:
    """The short way of one text model's plain requests.

    A request is counted by the text model and by each of its steps as on the long way.
    """

    def __init__(self, reader: PlainReader) -> None:
        # Without the model itself: a weak table by the model would keep the model alive.
        self.reader = reader
        self._steps = reader.pipeline.steps
        options = reader.pipeline.options
        self._prefix = f"in ensemble '{options.name}', " if options.is_ensemble else ""
        """Begins the errors of an ensemble."""

    @classmethod
    def of(cls, model: object) -> DirectText | None:
        """The short way of a text model; None where user code makes the prompts, or where the
        model is no text model.
        """
        pipeline = native_pipeline(model)
        if pipeline is None or not isinstance(model, MeasuredModel):
            return None
        return cls(PlainReader(pipeline, model.plain))

    def response(self, request: InferRequest) -> InferResponse:
        """The response to a request, without outputs."""
        options = self.reader.pipeline.options
        return InferResponse(
            model_name=options.name,
            model_version=options.version,
            id=request.id,
            parameters=sequence_parameters(request) if options.is_ensemble else {},
            is_final=True,
        )

    async def respond(self, model: Model, plain: PlainRequest) -> InferResponse:
        """`run`, with the response in the text model's form."""
        answer = await self.run(model, plain)
        response = self.response(plain.request)
        data = object_array([answer.text.encode()])
        response.outputs = [Tensor(self.reader.output, "BYTES", data)]
        return response

    async def run(self, model: Model, plain: PlainRequest) -> PlainAnswer:
        """Run a request of `reader` for the model itself. Cancelling the caller's task cancels
        the request.

        Raises:
            RequestError: the engine is down, or refused or lost the request.
        """
        assert isinstance(model, MeasuredModel)
        measure = model.measure(plain.request)
        measure.began_earlier(plain.tokenized_ns)
        model.begin()
        try:
            chunk, ended_ns = await self._run_steps(plain)
            answer = await self._answer(plain, chunk, ended_ns)
            measure.responded()
        except RequestError as error:
            if not self._prefix:
                measure.end(error)
                raise
            shown = prefixed(self._prefix, error)
            measure.end(shown)
            raise shown from error
        except BaseException as error:
            measure.end(error)
            raise
        measure.end(None)
        return answer

    async def _run_steps(self, plain: PlainRequest) -> tuple[TokenChunk, int]:
        """The ids of the answer, and when they came."""
        steps, request = self._steps, plain.request
        steps.preprocessing.count(plain.tokenized_ns)
        token = steps.token
        model = token.plain
        assert isinstance(model, TokenModel)
        to_token = InferRequest(
            model_name=token.name,
            id=request.id,
            priority=request.priority,
            timeout_us=request.timeout_us,
            arrival_ns=request.arrival_ns,
            handed_ns=time.monotonic_ns(),
            parent=request,
        )
        measure = token.measure(to_token)
        token.begin()
        try:
            chunk = await model.run_one(to_token, plain.one)
        except BaseException as error:
            measure.end(error)
            raise
        measure.responded()
        measure.end(None)
        return chunk, time.monotonic_ns()

    async def _answer(
        self, plain: PlainRequest, chunk: TokenChunk, began_ns: int
    ) -> PlainAnswer:
        steps, ids = self._steps, chunk.token_ids
        detokenizer = steps.tokenizer.detokenizer(plain.prompt_ids, plain.skip_special_tokens)
        push = partial(detokenizer.push, ids, is_last=True)
        text = push() if len(ids) <= INLINE_IDS else await steps.tokenizer.in_thread(push)
        steps.postprocessing.count(time.monotonic_ns() - began_ns)
        return PlainAnswer(
            text=text if plain.excludes_input else plain.prompt + text,
            token_ids=ids,
            finish_reason=REASONS[chunk.finish_reason],
            num_input=len(plain.prompt_ids),
            figures=chunk.extras.get("figures", {}) if chunk.extras else {},
        )
