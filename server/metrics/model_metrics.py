"""The ``nv_inference_*`` metrics of the served models."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import CollectorRegistry
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.server.inference.request import QueueingModel
from trimaran.server.metrics.exposition import QuantileSummary
from trimaran.server.metrics.options import MetricsOptions
from trimaran.server.repository.metric_settings import (
    FIRST_RESPONSE,
    first_response_buckets,
    tag_labels,
)

_LABELS = ("model", "version")
_DURATIONS = {
    "request": "inference request",
    "queue": "inference queuing",
    "compute_input": "compute input",
    "compute_infer": "compute inference",
    "compute_output": "inference compute output",
}
_UNCACHED = "(does not include cached requests)"
"""The end of help texts as Triton prints them; no answer comes from a cache here."""

_SUMMARIES = tuple(_DURATIONS)


class FailureReason(Enum):
    """The reason of a failed request, as the failure counter's label."""

    REJECTED = "REJECTED"
    """The request's queue was full, or the request waited too long."""

    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    """The backend failed or died."""

    OTHER = "OTHER"
    """The request has a faulty value, a step of an ensemble failed, or the server has a bug."""


class InferenceFamilies:
    """The metric families that all models share."""

    def __init__(self, registry: CollectorRegistry, options: MetricsOptions) -> None:
        self.options = options
        self.registry = registry
        self.tags: dict[tuple[str, str], dict[str, str]] = {}
        """Additional labels of a model version's series, by name and version."""

        self.success = self._counter(
            "request_success", "Number of successful inference requests, all batch sizes"
        )
        self.failure = Counter(
            "nv_inference_request_failure",
            "Number of failed inference requests, all batch sizes",
            (*_LABELS, "reason"),
            registry=registry,
        )
        self.count = self._counter("count", f"Number of inferences performed {_UNCACHED}")
        self.executions = self._counter(
            "exec_count", f"Number of model executions performed {_UNCACHED}"
        )
        self.durations = {
            name: self._counter(
                f"{name}_duration_us",
                f"Cumulative {what} duration in microseconds "
                f"{_UNCACHED if name.startswith('compute') else '(includes cached requests)'}",
            )
            for name, what in (_DURATIONS if options.has_counters else {}).items()
        }
        self.pending = Gauge(
            "nv_inference_pending_request_count",
            "Instantaneous number of pending requests awaiting execution per-model.",
            _LABELS,
            registry=registry,
        )
        self.load_duration = Gauge(
            "nv_model_load_duration_secs",
            "Model load time in seconds",
            _LABELS,
            registry=registry,
        )
        self.first_response: dict[tuple[float, ...], Histogram] = {}
        self.summaries = {
            name: QuantileSummary(
                f"nv_inference_{name}_summary_us",
                f"Summary of {name.replace('_', ' ')} duration in microseconds",
                options.quantiles,
                registry,
            )
            for name in (_SUMMARIES if options.has_summaries else ())
        }

    def remove(self, model: str, version: str) -> None:
        """Remove the series of a model version. A version that is added later begins at 0."""
        labels = (model, version)
        self.tags.pop(labels, None)
        families: list[Counter | Gauge | Histogram] = [
            self.success, self.count, self.executions, self.pending, self.load_duration,
            *self.durations.values(), *self.first_response.values(),
        ]  # fmt: skip
        for family in families:
            family.remove(*labels)
        for reason in FailureReason:
            self.failure.remove(*labels, reason.value)
        for summary in self.summaries.values():
            summary.remove_series(model, version)

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(f"nv_inference_{name}", documentation, _LABELS, registry=self.registry)


class ModelMetrics:
    """One model version's series. All exist with value 0 from the beginning."""

    def __init__(
        self, families: InferenceFamilies, name: str, version: str, config: ModelConfig
    ) -> None:
        labels = (name, version)
        self._labels = labels
        families.tags[labels] = tag_labels(config)
        self._success = families.success.labels(*labels)
        self._failures = {
            reason: families.failure.labels(*labels, reason.value) for reason in FailureReason
        }
        self._count = families.count.labels(*labels)
        self._executions = families.executions.labels(*labels)
        self._durations = {
            name: counter.labels(*labels) for name, counter in families.durations.items()
        }
        self._rests = dict.fromkeys(self._durations, 0.0)
        self._pending = families.pending.labels(*labels)
        families.load_duration.labels(*labels)
        self._summaries = families.summaries
        for summary in self._summaries.values():
            summary.add_series(name, version)
        self._first_response: Histogram | None = None
        if families.options.has_histograms:
            self._first_response = _first_response_series(families, labels, config)

    def show_queue(self, model: QueueingModel) -> None:
        """Show how many requests of the model wait, read at each scrape."""
        self._pending.set_function(lambda: model.num_queued)

    def success(
        self,
        *,
        batch_size: int,
        total_us: float,
        input_us: float,
        queue_us: float,
        infer_us: float,
        num_executions: int = 1,
    ) -> None:
        """Count a finished request. One request of each executed batch counts the execution."""
        self._success.inc()
        self._count.inc(batch_size)
        self._executions.inc(num_executions)
        output_us = max(0.0, total_us - input_us - queue_us - infer_us)
        for name, value in (
            ("request", total_us),
            ("queue", queue_us),
            ("compute_input", input_us),
            ("compute_infer", infer_us),
            ("compute_output", output_us),
        ):
            if name in self._durations:
                # Whole microseconds are shown; the rest of each request is kept for the next.
                whole, self._rests[name] = divmod(self._rests[name] + value, 1.0)
                self._durations[name].inc(whole)
            if name in self._summaries:
                self._summaries[name].observe(*self._labels, value)

    def failure(self, reason: FailureReason) -> None:
        """Count a failed request."""
        self._failures[reason].inc()

    def first_response(self, elapsed_ms: float) -> None:
        """Record the time from a request's arrival to its first response."""
        if self._first_response is not None:
            self._first_response.observe(elapsed_ms)


def _first_response_series(
    families: InferenceFamilies, labels: tuple[str, str], config: ModelConfig
) -> Histogram:
    return _histogram_with(families, first_response_buckets(config)).labels(*labels)


def _histogram_with(families: InferenceFamilies, buckets: tuple[float, ...]) -> Histogram:
    """The family with these buckets: a family of `prometheus_client` has one bucket list."""
    if buckets not in families.first_response:
        # Only the first family is registered; the merger shows the others too.
        is_first = not families.first_response
        families.first_response[buckets] = Histogram(
            FIRST_RESPONSE,
            "Duration from request to first response in milliseconds",
            _LABELS,
            buckets=buckets,
            registry=None,
        )
        if is_first:
            families.registry.register(_MergedHistogram(families.first_response))
    return families.first_response[buckets]


class _MergedHistogram:
    """Histograms of one name whose series have different buckets, shown as one family."""

    def __init__(self, parts: dict[tuple[float, ...], Histogram]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        """`prometheus_client` collects samples here."""
        metrics = [metric for part in self._parts.values() for metric in part.collect()]
        for metric in metrics[1:]:
            metrics[0].samples += metric.samples
        yield from metrics[:1]
