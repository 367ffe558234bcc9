"""The ``nv_inference_*`` metrics of the served models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import Gauge
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.server.inference.request import QueueingModel
from trimaran.server.metrics.exposition import QuantileSummary
from trimaran.server.metrics.histograms import HistogramFamily, HistogramSeries
from trimaran.server.metrics.model_statistics import FailureReason, ModelStatistics
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


class InferenceFamilies:
    """The metric families that all models share."""

    def __init__(self, registry: CollectorRegistry, options: MetricsOptions) -> None:
        self.options = options
        self.registry = registry
        self.tags: dict[tuple[str, str], dict[str, str]] = {}
        """Additional labels of a model version's series, by name and version."""

        self.counts = _RequestCounts(registry, has_durations=options.has_counters)
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
        self.first_response = HistogramFamily(
            FIRST_RESPONSE,
            "Duration from request to first response in milliseconds",
            _LABELS,
            registry,
        )
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
        self.counts.of_models.pop(labels, None)
        for family in (self.pending, self.load_duration, self.first_response):
            family.remove(*labels)
        for summary in self.summaries.values():
            summary.remove_series(model, version)


class _RequestCounts:
    """Reads the statistics of all models at each scrape."""

    def __init__(self, registry: CollectorRegistry, *, has_durations: bool) -> None:
        self.of_models: dict[tuple[str, str], ModelStatistics] = {}
        self._durations = _DURATIONS if has_durations else {}
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """`prometheus_client` collects samples here."""
        yield self._family(
            "request_success",
            "Number of successful inference requests, all batch sizes",
            lambda counts: counts.success.count,
        )
        yield self._failures()
        yield self._family(
            "count",
            f"Number of inferences performed {_UNCACHED}",
            lambda counts: counts.num_inferences,
        )
        yield self._family(
            "exec_count",
            f"Number of model executions performed {_UNCACHED}",
            lambda counts: counts.num_executions,
        )
        for name, what in self._durations.items():
            yield self._family(
                f"{name}_duration_us",
                f"Cumulative {what} duration in microseconds "
                f"{_UNCACHED if name.startswith('compute') else '(includes cached requests)'}",
                partial(_duration_us, name),
            )

    def _family(
        self, name: str, documentation: str, value: Callable[[ModelStatistics], int]
    ) -> Metric:
        family = CounterMetricFamily(f"nv_inference_{name}", documentation, labels=_LABELS)
        for labels, counts in self.of_models.items():
            family.add_metric(labels, value(counts))
        return family

    def _failures(self) -> Metric:
        family = CounterMetricFamily(
            "nv_inference_request_failure",
            "Number of failed inference requests, all batch sizes",
            labels=(*_LABELS, "reason"),
        )
        for labels, counts in self.of_models.items():
            for reason, number in counts.num_failures.items():
                family.add_metric((*labels, reason.value), number)
        return family


def _duration_us(name: str, counts: ModelStatistics) -> int:
    return counts.durations_ns()[name] // 1000


class ModelMetrics:
    """One model version's series. All exist with value 0 from the beginning."""

    def __init__(
        self, families: InferenceFamilies, name: str, version: str, config: ModelConfig
    ) -> None:
        labels = (name, version)
        self._labels = labels
        families.tags[labels] = tag_labels(config)
        known = families.counts.of_models
        self.statistics = known.setdefault(labels, ModelStatistics(name, version))
        """The counts of a version go on if the version is measured again without `remove`."""
        self._pending = families.pending.labels(*labels)
        families.load_duration.labels(*labels)
        self._summaries = families.summaries
        for summary in self._summaries.values():
            summary.add_series(name, version)
        self._first_response: HistogramSeries | None = None
        if families.options.has_histograms:
            bounds = first_response_buckets(config)
            self._first_response = families.first_response.series(labels, bounds)

    def show_queue(self, model: QueueingModel) -> None:
        """Show how many requests of the model wait, read at each scrape."""
        self._pending.set_function(lambda: model.num_queued)

    def success(
        self,
        *,
        batch_size: int,
        executed_batch: int,
        total_ns: int,
        input_ns: int,
        queue_ns: int,
        infer_ns: int,
    ) -> None:
        """Count a finished request; see `ModelStatistics.record_success`."""
        self.statistics.record_success(
            batch_size=batch_size,
            executed_batch=executed_batch,
            total_ns=total_ns,
            input_ns=input_ns,
            queue_ns=queue_ns,
            infer_ns=infer_ns,
        )
        if not self._summaries:
            return
        phases = {
            "request": total_ns,
            "queue": queue_ns,
            "compute_input": input_ns,
            "compute_infer": infer_ns,
            "compute_output": max(0, total_ns - input_ns - queue_ns - infer_ns),
        }
        for name, ns in phases.items():
            self._summaries[name].observe(*self._labels, ns / 1e3)

    def failure(self, reason: FailureReason, total_ns: int | None) -> None:
        """Count a failed request; see `ModelStatistics.record_failure`."""
        self.statistics.record_failure(reason, total_ns)

    def first_response(self, elapsed_ns: int) -> None:
        """Record the time from a request's arrival to its first response."""
        if self._first_response is not None:
            self._first_response.observe(elapsed_ns / 1e6)
