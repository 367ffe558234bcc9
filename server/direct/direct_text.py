"""Runs plain text requests: a prompt's ids to the engine, the answer's ids to text."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from functools import partial

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import FinishReason
from trimaran.server.direct.plain_request import PlainReader, PlainRequest
from trimaran.server.engines.live_request import TokenChunk
from trimaran.server.inference.request import InferRequest, InferResponse, Model, Tensor
from trimaran.server.inference.tensor_bytes import object_array
from trimaran.server.metrics.measured_model import MeasuredModel, Measurement
from trimaran.server.models.graph_model import prefixed, sequence_parameters
from trimaran.server.models.sequence_outputs import REASONS
from trimaran.server.models.text_models import native_pipeline
from trimaran.server.models.token_model import TokenModel
from trimaran.server.models.tokenizer import INLINE_IDS


class _OwnErrors:
    """The context of work of an ensemble's steps, whose errors name the ensemble."""

    __slots__ = ("_prefix",)

    def __init__(self, prefix: str) -> None:
        """Without a prefix errors stay as they are."""
        self._prefix = prefix

    def __enter__(self) -> None:
        """Nothing happens before an error."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if self._prefix and isinstance(error, RequestError):
            raise prefixed(self._prefix, error) from error


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

    def __init__(self, reader: PlainReader, token: TokenModel) -> None:
        # Without the model itself: a weak table by the model would keep the model alive.
        self.reader = reader
        self._token = token
        self._steps = reader.pipeline.steps
        options = reader.pipeline.options
        self._own_errors = _OwnErrors(
            f"in ensemble '{options.name}', " if options.is_ensemble else ""
        )

    @classmethod
    def of(cls, model: object) -> DirectText | None:
        """The short way of a text model; None where user code makes the prompts or the tokens,
        or where the model is no text model.
        """
        pipeline = native_pipeline(model)
        if pipeline is None or not isinstance(model, MeasuredModel):
            return None
        token = pipeline.steps.token.plain
        if not isinstance(token, TokenModel):
            return None
        return cls(PlainReader(pipeline, model.plain), token)

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
        response.outputs = self._outputs(answer.text)
        return response

    def _outputs(self, text: str) -> list[Tensor]:
        data = object_array([text.encode()])
        return [Tensor(self.reader.output, "BYTES", data)]

    async def run(self, model: Model, plain: PlainRequest) -> PlainAnswer:
        """Run a request of `reader` for the model itself. Cancelling the caller's task cancels
        the request.

        Raises:
            RequestError: the engine is down, or refused or lost the request.
        """
        with self._measure(model, plain) as measure, self._own_errors:
            request, counted = self._token_request(plain)
            with counted:
                chunk = await self._token.run_one(request, plain.one)
                counted.responded()
            answer = await self._answer(plain, chunk, time.monotonic_ns())
            measure.responded()
        return answer

    async def stream(
        self, model: Model, plain: PlainRequest
    ) -> AsyncGenerator[InferResponse, None]:
        """The responses to a streaming request of `reader`, for the model itself, as of
        `Model.infer`: one for each chunk of ids that completes text, and the last one.
        """
        steps, first = self._steps, self.response(plain.request)
        pieces = steps.tokenizer.detokenizer(plain.prompt_ids, plain.skip_special_tokens)
        measure = self._measure(model, plain)
        request, counted = self._token_request(plain)
        with measure, self._own_errors, counted:
            stream = await self._token.start_one(request, plain.one, is_incremental=True)
            is_over = False
            try:
                while not is_over:
                    chunk = await stream.next()
                    is_over, began_ns = chunk.is_last, time.monotonic_ns()
                    counted.responded(is_final=is_over)
                    push = partial(pieces.push, chunk.token_ids, is_last=is_over)
                    is_short = len(chunk.token_ids) <= INLINE_IDS
                    text = push() if is_short else await steps.tokenizer.in_thread(push)
                    if is_over:
                        steps.postprocessing.count(time.monotonic_ns() - began_ns)
                    # A stopped stream ends without a response, unless text is left.
                    is_stopped = chunk.finish_reason is FinishReason.CANCELLED
                    if text or (is_over and not is_stopped):
                        measure.responded(is_final=is_over)
                        yield InferResponse(
                            model_name=first.model_name,
                            model_version=first.model_version,
                            id=first.id,
                            outputs=self._outputs(text),
                            parameters=first.parameters,
                            is_final=is_over,
                        )
            finally:
                self._token.end_one(request, stream)

    def _measure(self, model: Model, plain: PlainRequest) -> Measurement:
        """The count of a request, whose preprocessing is over."""
        assert isinstance(model, MeasuredModel)
        measure = model.measure(plain.request)
        measure.began_earlier(plain.tokenized_ns)
        self._steps.preprocessing.count(plain.tokenized_ns)
        return measure

    def _token_request(self, plain: PlainRequest) -> tuple[InferRequest, Measurement]:
        """The request to the token model, and its count."""
        token, request = self._steps.token, plain.request
        to_token = InferRequest(
            model_name=token.name,
            id=request.id,
            priority=request.priority,
            timeout_us=request.timeout_us,
            arrival_ns=request.arrival_ns,
            handed_ns=time.monotonic_ns(),
            parent=request,
        )
        return to_token, token.measure(to_token)

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
