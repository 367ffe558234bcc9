"""A model that counts its requests: statistics and metrics for every model alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType

from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelStatistics as StatisticsMessage
from tritonclient.grpc.service_pb2 import StatisticDuration

from trimaran.comm.errors import EngineDeadError, ErrorKind, RefusedError, RequestError
from trimaran.server.inference.request import (
    InferRequest,
    InferResponse,
    Model,
    OneResponseModel,
)
from trimaran.server.inference.text_limits import PromptBound, prompt_bound
from trimaran.server.metrics.model_metrics import FailureReason, ModelMetrics


@dataclass(slots=True)
class _Duration:
    """How often something happened and how long it took in total."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def message(self) -> StatisticDuration:
        return StatisticDuration(count=self.count, ns=self.ns)


class ModelStatistics:
    """One model version's counters. Used on the event loop only."""

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self._last_inference_ms = 0
        self._num_inferences = 0
        self._num_executions = 0
        self._success = _Duration()
        self._fail = _Duration()
        self._input_ns = self._queue_ns = self._infer_ns = self._output_ns = 0
        """Of successful requests: each has every phase once."""
        self._batches: dict[int, _Duration] = {}

    def record_success(
        self,
        *,
        batch_size: int,
        total_ns: int,
        input_ns: int,
        queue_ns: int,
        infer_ns: int,
        executed_batch: int | None = None,
    ) -> None:
        """Count a finished request; time that is neither input, queue nor inference is output.

        ``executed_batch`` is the size of the request's batch, or 0 where another request of the
        batch reports it.
        """
        self._last_inference_ms = time.time_ns() // 1_000_000
        self._num_inferences += batch_size
        self._success.add(total_ns)
        self._input_ns += input_ns
        self._queue_ns += queue_ns
        self._infer_ns += infer_ns
        self._output_ns += max(0, total_ns - input_ns - queue_ns - infer_ns)
        size = batch_size if executed_batch is None else executed_batch
        if size:
            self._num_executions += 1
            self._batches.setdefault(size, _Duration()).add(infer_ns)

    def record_failure(self, total_ns: int) -> None:
        """Count a request that ended with an error or was cancelled."""
        self._fail.add(total_ns)

    def message(self) -> StatisticsMessage:
        """The counters as the protocol's message."""
        message = StatisticsMessage(
            name=self.name,
            version=self.version,
            last_inference=self._last_inference_ms,
            inference_count=self._num_inferences,
            execution_count=self._num_executions,
        )
        totals = message.inference_stats
        count = self._success.count
        totals.success.CopyFrom(self._success.message())
        totals.fail.CopyFrom(self._fail.message())
        for phase, ns in (
            (totals.queue, self._queue_ns),
            (totals.compute_input, self._input_ns),
            (totals.compute_infer, self._infer_ns),
            (totals.compute_output, self._output_ns),
        ):
            phase.CopyFrom(StatisticDuration(count=count, ns=ns))
        totals.cache_hit.CopyFrom(StatisticDuration())
        totals.cache_miss.CopyFrom(StatisticDuration())
        for batch_size, infer in sorted(self._batches.items()):
            message.batch_stats.add(
                batch_size=batch_size,
                compute_input=StatisticDuration(count=infer.count),
                compute_infer=infer.message(),
                compute_output=StatisticDuration(count=infer.count),
            )
        return message


class MeasuredModel:
    """Wraps a model and behaves as the wrapped model does.

    A request counts once, when it ends: as a success, or as a failure with its reason. A
    non-decoupled request ends with its response, so that a client which reads the statistics
    right after the response finds the request counted.
    """

    def __init__(
        self, model: Model, statistics: ModelStatistics, metrics: ModelMetrics
    ) -> None:
        self._model = model
        self.statistics = statistics
        self.metrics = metrics
        self._one = model if isinstance(model, OneResponseModel) else None
        self._num_running = 0
        self._ended = asyncio.Event()
        self.name = model.name
        self.version = model.version
        self.config: ModelConfig = model.config

    def counting_on(self, model: Model) -> MeasuredModel:
        """Another model with this name and version, whose requests are added to this model's
        counts.
        """
        return MeasuredModel(model, self.statistics, self.metrics)

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
        measure, error = Measurement(self, self._model, request), None
        self.begin()
        try:
            response = await self._one.respond(request)
            measure.response(response)
        except BaseException as failure:
            error = failure
            raise
        finally:
            measure.end(error)
        return response

    def begin(self) -> None:
        """A request starts running."""
        self._num_running += 1

    def end(self) -> None:
        """A request has ended."""
        self._num_running -= 1
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
    """Runs one request on the wrapped model and counts the request.

    A context: leaving it closes `responses` and counts the request as a success, or as a
    failure by the exception. The first outcome counts; later ones are ignored.
    """

    responses: AsyncIterator[InferResponse]
    """Responses of the wrapped model. The caller reports each to `response`."""

    def __init__(self, model: MeasuredModel, plain: Model, request: InferRequest) -> None:
        self._model = model
        self._plain = plain
        self._is_decoupled = plain.is_decoupled
        self._statistics = model.statistics
        self._metrics = model.metrics
        self._request = request
        self._started_ns = time.monotonic_ns()
        self._arrived_ns = request.handed_ns or request.arrival_ns or self._started_ns
        self._responded_ns = 0
        self._is_over = False
        first = next(iter(request.inputs.values()), None)
        batches = model.config.max_batch_size > 0 and first is not None and first.shape
        self._batch_size = first.shape[0] if batches and first is not None else 1

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
        now = time.monotonic_ns()
        if not self._responded_ns:
            self._metrics.first_response((now - self._arrived_ns) / 1e6)
        self._responded_ns = now
        if response.is_final or not self._is_decoupled:
            self.success()

    def given_up(self) -> None:
        """The caller wants no further response."""
        self._failure(FailureReason.CANCELED)

    def success(self) -> None:
        """The request is complete."""
        if self._is_over:
            return
        self._is_over = True
        now = time.monotonic_ns()
        total_ns = now - self._arrived_ns
        started_ns = self._request.started_ns or self._started_ns
        # Before a model has the request, the request is decoded and checked.
        input_ns = self._started_ns - self._arrived_ns
        queue_ns = started_ns - self._started_ns
        infer_ns = (self._responded_ns or now) - started_ns
        executed = self._request.executed_batch
        if executed is None:
            executed = self._batch_size
        self._statistics.record_success(
            batch_size=self._batch_size,
            executed_batch=executed,
            total_ns=total_ns,
            input_ns=input_ns,
            queue_ns=queue_ns,
            infer_ns=infer_ns,
        )
        self._metrics.success(
            batch_size=self._batch_size,
            num_executions=min(executed, 1),
            total_us=total_ns / 1e3,
            input_us=input_ns / 1e3,
            queue_us=queue_ns / 1e3,
            infer_us=infer_ns / 1e3,
        )

    def end(self, error: BaseException | None) -> None:
        """The request has ended, with this error or none. Called once."""
        if error is None:
            self.success()
        elif isinstance(error, (GeneratorExit, asyncio.CancelledError)):
            self.given_up()
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
        if has_begun or self._responded_ns:
            self._statistics.record_failure(time.monotonic_ns() - self._arrived_ns)
        self._metrics.failure(reason)
