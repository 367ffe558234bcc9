"""A model that counts its requests: statistics and metrics for every model alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import TracebackType

from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import EngineDeadError, ErrorKind, RefusedError, RequestError
from trimaran.server.inference.request import (
    InferRequest,
    InferResponse,
    Model,
    OneResponseModel,
)
from trimaran.server.inference.text_limits import PromptBound, prompt_bound
from trimaran.server.metrics.model_metrics import ModelMetrics
from trimaran.server.metrics.model_statistics import FailureReason


class MeasuredModel:
    """Wraps a model and behaves as the wrapped model does.

    A request counts once, when it ends: as a success, or as a failure with its reason. A
    non-decoupled request ends with its response, so that a client which reads the statistics
    right after the response finds the request counted.
    """

    def __init__(self, model: Model, metrics: ModelMetrics) -> None:
        self._model = model
        self.metrics = metrics
        self.statistics = metrics.statistics
        self._one = model if isinstance(model, OneResponseModel) else None
        self._num_running = 0
        self._ended = asyncio.Event()
        self.name = model.name
        self.version = model.version
        self.config: ModelConfig = model.config
        self.is_batched = model.config.max_batch_size > 0

    def counting_on(self, model: Model) -> MeasuredModel:
        """Another model with this name and version, whose requests are added to this model's
        counts.
        """
        return MeasuredModel(model, self.metrics)

    @property
    def num_running(self) -> int:
        """Requests that run, including requests from composed models."""
        return self._num_running

    async def wait_idle(self) -> None:
        """Return when no request is running."""
        while self._num_running:
            self._ended.clear()
            await self._ended.wait()

    @property
    def plain(self) -> Model:
        """The wrapped model."""
        return self._model

    @property
    def is_ready(self) -> bool:
        """Whether a request could run now."""
        return self._model.is_ready

    @property
    def is_decoupled(self) -> bool:
        """Whether a request may have other than one response."""
        return self._model.is_decoupled

    @property
    def prompt_bound(self) -> PromptBound | None:
        """See `PromptModel`."""
        return prompt_bound(self._model)

    def measure(self, request: InferRequest) -> Measurement:
        """One request, for a caller that reads the wrapped model's responses itself."""
        return Measurement(self, self._model, request)

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        """Run one request and count it."""
        async with self.measure(request) as measure:
            async for response in measure.responses:
                measure.response(response)
                yield response

    async def respond(self, request: InferRequest) -> InferResponse | None:
        """Run one request of a model with one response, and count it; the last response of a
        model with several, or None.
        """
        if self._one is None:
            last: InferResponse | None = None
            async with aclosing(self.infer(request)) as responses:  # type: ignore[type-var]
                async for each in responses:
                    last = each
            return last
        with self.measure(request) as measure:
            response = await self._one.respond(request)
            measure.response(response)
        return response

    def count(self, elapsed_ns: int) -> None:
        """Count one request of one prompt that its caller made in the model's place."""
        metrics = self.metrics
        metrics.first_response(elapsed_ns)
        metrics.success(
            batch_size=1, executed_batch=1, total_ns=elapsed_ns, input_ns=0, queue_ns=0,
            infer_ns=elapsed_ns,
        )  # fmt: skip

    def begin(self) -> None:
        """A request starts running."""
        self._num_running += 1

    def end(self) -> None:
        """A request has ended."""
        self._num_running -= 1
        if not self._num_running:
            self._ended.set()

    def reason(self, error: RequestError) -> FailureReason:
        """The failure reason of a request that ends with this error."""
        if error.kind is ErrorKind.CANCELLED:
            return FailureReason.CANCELED
        is_lost = isinstance(error, EngineDeadError)
        if error.kind is ErrorKind.UNAVAILABLE and not is_lost:
            return FailureReason.REJECTED
        if error.kind is ErrorKind.INVALID_ARG:
            return FailureReason.OTHER
        is_composed = self.config.platform == "ensemble"
        return FailureReason.OTHER if is_composed else FailureReason.BACKEND


class Measurement:
    """Counts one request: as a success, or as a failure by the exception that ends its context.
    The first outcome counts; later ones are ignored.

    The asynchronous context runs the request on the wrapped model, and closes `responses` at
    its end. In the other context the caller runs the request in the model's place.
    """

    responses: AsyncIterator[InferResponse]
    """Responses of the wrapped model. The caller reports each to `response`."""

    def __init__(self, model: MeasuredModel, plain: Model, request: InferRequest) -> None:
        self._model = model
        self._plain = plain
        self._is_decoupled = plain.is_decoupled
        self._metrics = model.metrics
        self._request = request
        self._started_ns = time.monotonic_ns()
        self._arrived_ns = request.handed_ns or request.arrival_ns or self._started_ns
        self._responded_ns = 0
        self._is_over = False
        self._batch_size = request.batch_size if model.is_batched else 1

    def began_earlier(self, elapsed_ns: int) -> None:
        """The model's work began this long before the measurement: a step's work on the
        request's text.
        """
        self._started_ns = max(self._arrived_ns, self._started_ns - elapsed_ns)

    def __enter__(self) -> Measurement:
        self._model.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(error)

    async def __aenter__(self) -> Measurement:
        """Start the request."""
        self._model.begin()
        try:
            self.responses = self._plain.infer(self._request)
        except BaseException as error:
            self.end(error)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the responses and count the request."""
        try:
            await self.responses.aclose()  # type: ignore[attr-defined]
        except BaseException as later:
            error = later
            raise
        finally:
            self.end(error)

    def response(self, response: InferResponse) -> None:
        """A response arrived."""
        self.responded(is_final=response.is_final)

    def responded(self, *, is_final: bool = True) -> None:
        """`response`, of a caller that makes no response object of it."""
        now = time.monotonic_ns()
        if not self._responded_ns:
            self._metrics.first_response(now - self._arrived_ns)
        self._responded_ns = now
        if (is_final or not self._is_decoupled) and not self._is_over:
            self._succeed()

    def cancelled(self) -> None:
        """The caller wants no further response."""
        self._failure(FailureReason.CANCELED)

    def _succeed(self) -> None:
        """The request is complete."""
        self._is_over = True
        request = self._request
        now = time.monotonic_ns()
        total_ns = now - self._arrived_ns
        started_ns = request.started_ns or self._started_ns
        # Before a model has the request, the request is decoded and checked.
        input_ns = self._started_ns - self._arrived_ns + request.steps_input_ns
        queue_ns = started_ns - self._started_ns + request.steps_queue_ns
        infer_ns = (self._responded_ns or now) - started_ns
        infer_ns -= request.steps_input_ns + request.steps_queue_ns + request.steps_output_ns
        # Steps that run at the same time take more time together than passes.
        infer_ns = max(infer_ns, request.steps_infer_ns)
        if (parent := request.parent) is not None:
            parent.steps_input_ns += input_ns
            parent.steps_queue_ns += queue_ns
            parent.steps_infer_ns += infer_ns
            parent.steps_output_ns += max(0, total_ns - input_ns - queue_ns - infer_ns)
        executed = request.executed_batch
        self._metrics.success(
            batch_size=self._batch_size,
            executed_batch=self._batch_size if executed is None else executed,
            total_ns=total_ns,
            input_ns=input_ns,
            queue_ns=queue_ns,
            infer_ns=infer_ns,
        )

    def end(self, error: BaseException | None) -> None:
        """The request has ended, with this error or none. Called once."""
        if error is None:
            if not self._is_over:
                self._succeed()
        elif isinstance(error, (GeneratorExit, asyncio.CancelledError)):
            self.cancelled()
        elif isinstance(error, RequestError):
            is_refused = isinstance(error, RefusedError)
            self._failure(self._model.reason(error), has_begun=not is_refused)
        else:
            self._failure(FailureReason.OTHER)
        self._model.end()

    def _failure(self, reason: FailureReason, *, has_begun: bool = True) -> None:
        """The request failed or was cancelled. Phases that had not begun are not counted."""
        if self._is_over:
            return
        self._is_over = True
        has_time = has_begun or self._responded_ns
        elapsed_ns = time.monotonic_ns() - self._arrived_ns if has_time else None
        self._metrics.failure(reason, elapsed_ns)
