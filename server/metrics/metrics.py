"""All metrics of one front end, in a registry of their own, and the verbose log of engines."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import Metric
from prometheus_client.registry import CollectorRegistry
from tritonclient.grpc.service_pb2 import ModelStatistics as StatisticsMessage

from trimaran.comm.messages.messages import ExpertReport
from trimaran.server.inference.request import Model, QueueingModel
from trimaran.server.metrics.backend_samples import BackendSamples
from trimaran.server.metrics.custom_metrics import CustomMetrics
from trimaran.server.metrics.engine_metrics import EngineMetrics, RequestSeries
from trimaran.server.metrics.exposition import render
from trimaran.server.metrics.group_board import BoardMetrics, GroupBoard
from trimaran.server.metrics.host_metrics import HostMetrics, HostOptions, HostReading
from trimaran.server.metrics.measured_model import MeasuredModel
from trimaran.server.metrics.model_metrics import InferenceFamilies, ModelMetrics
from trimaran.server.metrics.options import MetricsOptions
from trimaran.server.metrics.other_counts import OtherCounts, own_counts
from trimaran.server.metrics.recent_rates import Key, ModelCounts

_TOKENS, _IMBALANCE = "trimaran_expert_tokens", "trimaran_expert_imbalance"
_Counts = dict[int, NDArray[np.int64]]
"""Tokens of each expert, by layer."""

_Key = tuple[str, str]


class ExpertMetrics:
    """Tokens of every expert of each model, over all of its groups and their restarts.

    Models without experts have no series.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._totals: dict[_Key, _Counts] = {}
        self._seen: dict[tuple[_Key, str], _Counts] = {}
        registry.register(self)

    def remove_model(self, model: str, version: str) -> None:
        """Remove the model's series. A model that is added again begins at 0."""
        key = model, version
        self._totals.pop(key, None)
        for known in [known for known in self._seen if known[0] == key]:
            del self._seen[known]

    def add(
        self, model: str, version: str, group: str, report: ExpertReport, incarnation: int = 0
    ) -> None:
        """Add the increase of a group's sums since the last report, as `GroupSums` does."""
        key = model, version
        counts_from_here = incarnation > 0 and (key, group) not in self._seen
        seen = self._seen.setdefault((key, group), {})
        totals = self._totals.setdefault(key, {})
        rows = np.frombuffer(report.counts, "<i8").reshape(len(report.layers), -1)
        for layer, now in zip(report.layers, rows, strict=True):
            then = now if counts_from_here else seen.get(layer)
            is_going_on = then is not None and bool((now >= then).all())
            grown = now - then if then is not None and is_going_on else now
            totals[layer] = totals[layer] + grown if layer in totals else grown.copy()
            seen[layer] = now

    def collect(self) -> Iterator[Metric]:
        """`prometheus_client` collects samples here."""
        tokens = Metric(_TOKENS, "Tokens that chose an expert, since the start", "counter")
        imbalance = Metric(
            _IMBALANCE, "Tokens of a layer's busiest expert over those of the average", "gauge"
        )
        for (model, version), totals in self._totals.items():
            for layer, counts in sorted(totals.items()):
                labels = {"model": model, "version": version, "layer": str(layer)}
                for expert, count in enumerate(counts.tolist()):
                    tokens.add_sample(_TOKENS, {**labels, "expert": str(expert)}, count)
                if mean := float(counts.mean()):
                    imbalance.add_sample(_IMBALANCE, labels, float(counts.max()) / mean)
        yield tokens
        yield imbalance


logger = logging.getLogger(__name__)

_TOTALS = {
    "Total Input Tokens": "total_input_tokens",
    "Total Output Tokens": "total_output_tokens",
}


def is_logged() -> bool:
    """Whether the log is verbose enough for iteration lines."""
    return logger.isEnabledFor(logging.DEBUG)


def log_engine_stats(model: str, stats: Mapping[str, float], samples: BackendSamples) -> None:
    """Write two JSON lines: a group's last iteration, with a value for each sample of
    ``nv_trt_llm_*``, and the model's totals.
    """
    values = samples.log_values(stats)
    logger.debug("%s: %s", model, json.dumps(values, sort_keys=True))
    totals = {name: int(stats.get(key, 0)) for name, key in _TOTALS.items()}
    logger.debug("%s: %s", model, json.dumps(totals))


class Metrics:
    """The metrics of a front end. Used on the event loop only.

    Every model is served through `measure`, including the steps of an ensemble, so that each
    model's requests are counted once and in the same way.
    """

    def __init__(
        self,
        metrics_config: Mapping[str, str] | None = None,
        host: HostOptions | None = None,
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        options = MetricsOptions.parse(dict(metrics_config or {}))
        self._families = InferenceFamilies(self._registry, options)
        self._engines = EngineMetrics(self._registry)
        self._backend_minor = options.backend_minor
        self._experts = ExpertMetrics(self._registry)
        self._host = HostMetrics(self._registry, host or HostOptions())
        self.custom = CustomMetrics(self._registry)
        """Metrics that user code of Python models defines."""

        self.others = OtherCounts()
        """Counts of the other front ends of this server."""

    def show_board(self, board: GroupBoard) -> None:
        """Show the states on the board of groups; called at most once."""
        BoardMetrics(board, self._registry)

    def measure(self, model: Model) -> MeasuredModel:
        """The model, wrapped to count its requests. A wrapped model is returned unchanged."""
        if isinstance(model, MeasuredModel):
            return model
        series = ModelMetrics(self._families, model.name, model.version, model.config)
        if isinstance(model, QueueingModel):
            series.show_queue(model)
        return MeasuredModel(model, series)

    def forget(self, model: str, version: str) -> None:
        """Remove the series of a model version; measured again, it counts from 0."""
        self._families.remove(model, version)
        self.others.forget(model, version)

    def set_load_duration(self, model: str, version: str, seconds: float) -> None:
        """Record how long a model took to load."""
        self._families.load_duration.labels(model, version).set(seconds)

    def set_backend_version(self, model: str, version: str, minor: int) -> None:
        """Show ``nv_trt_llm_*`` of a model as version 0.``minor`` of Triton's TensorRT-LLM
        backend does, unless the operator named a version.
        """
        self._engines.samples.set_version((model, version), self._backend_minor or minor)

    def add_engine(self, model: str, version: str) -> None:
        """Show the engine series of a token-level model, with value 0."""
        self._engines.add_model(model, version)

    def remove_engine(self, model: str, version: str) -> None:
        """Remove the series of a model version's engines."""
        self._engines.remove_model(model, version)
        self._experts.remove_model(model, version)
        self.others.forget_engine(model, version)

    def remove_group(self, model: str, version: str, group: str) -> None:
        """Remove the series of one worker group."""
        self._engines.remove_group(model, version, group)

    def request_series(self, model: str, version: str) -> RequestSeries:
        """The histograms of the requests of a token-level model."""
        return self._engines.request_series(model, version)

    def set_engine_stats(
        self,
        model: str,
        version: str,
        stats: Mapping[str, float],
        group: str = "",
        incarnation: int = 0,
    ) -> None:
        """Show the statistics of a group's last iteration (`comm.messages.STATS_KEYS`), added
        to those of the model's other groups. ``incarnation`` is the number of restarts.
        """
        self._engines.set_stats(model, version, stats, group, incarnation)
        if stats and is_logged():
            totals = self._engines.token_totals(model, version)
            samples = self._engines.samples.of((model, version))
            log_engine_stats(model, {**stats, **totals}, samples)

    def add_expert_tokens(
        self,
        model: str,
        version: str,
        report: ExpertReport,
        group: str = "",
        incarnation: int = 0,
    ) -> None:
        """Count the additional tokens of each expert of a group's engine."""
        self._experts.add(model, version, group, report, incarnation)

    def drop_engine_stats(self, model: str, version: str, group: str) -> None:
        """Remove the statistics of a group that is down."""
        self._engines.set_stats(model, version, {}, group)

    def set_engine_info(
        self, model: str, version: str, facts: Mapping[str, Any], group: str = ""
    ) -> None:
        """Show the backends, transports and start method of `EngineHello.facts`."""
        self._engines.set_info(model, version, facts, group)

    def group_state(
        self, model: str, group: str, is_up: bool, num_restarts: int, version: str = "1"
    ) -> None:
        """Show whether a worker group serves, and the number of its restarts."""
        self._engines.set_group(model, version, group, up=is_up, restarts=num_restarts)

    def count_group(
        self, model: str, version: str, group: str, num_requests: Callable[[], int]
    ) -> None:
        """Show the number of unfinished requests of a worker group, read at each scrape."""
        self._engines.count_group(model, version, group, num_requests)

    def count_replays(self, model: str, version: str, num_replays: int) -> None:
        """Add requests that were sent again after a group died."""
        self._engines.count_replays(model, version, num_replays)

    def count_lost(self, model: str, version: str, num_requests: int) -> None:
        """Add requests that failed because groups died."""
        self._engines.count_lost(model, version, num_requests)

    def latency_counts(self) -> dict[Key, ModelCounts]:
        """The latency histograms of all models."""
        return self._engines.latency_counts(self.others)

    def engine_values(self, model: str, version: str) -> Mapping[str, float] | None:
        """The last statistics of a model's engine; None for a model without an engine."""
        return self._engines.values(model, version)

    def read_host(self) -> HostReading:
        """Processors, memory and GPUs of this host."""
        return self._host.read()

    def load_header(self, style: str) -> str | None:
        """The ``endpoint-load-metrics`` header for a requested style, if there is one."""
        return self._engines.load_header(style)

    def render(self) -> bytes:
        """All series as Prometheus text."""
        metrics = self.others.added_to(self._registry.collect())
        return render(metrics, self._families.tags)

    def own_counts(
        self, statistics: Iterable[StatisticsMessage], num_running: int
    ) -> dict[str, Any]:
        """The counts that this front end reports to the first front end."""
        return own_counts(self._registry, statistics, num_running)
