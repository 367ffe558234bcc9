"""Counts of the other front ends of a server, added to those of the first front end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import CollectorRegistry
from tritonclient.grpc.service_pb2 import ModelStatistics as StatisticsMessage

from trimaran.server.metrics.custom_metrics import CustomMetric

_REQUESTS = "nv_inference_"
"""Counts of a model version's requests, without its engine."""

_ADDED = (
    _REQUESTS,
    "nv_llm_",
    "trimaran_time_to_first_token_seconds",
    "trimaran_inter_token_latency_seconds",
    "trimaran_replayed_requests",
    "trimaran_lost_requests",
    "trimaran_group_requests",
)
"""Families whose values are added up over front ends. All front ends receive the reports of
engines and of the host, so those families are not added up.
"""

_GAUGE = "gauge"
_NOTHING: Mapping[str, Any] = {"samples": (), "statistics": (), "num_running": 0}
_Key = tuple[str, tuple[tuple[str, str], ...]]
_Samples = dict[_Key, float]
_Statistics = dict[tuple[str, str], StatisticsMessage]


def own_counts(
    registry: CollectorRegistry, statistics: Iterable[StatisticsMessage], num_running: int
) -> dict[str, Any]:
    """The report of a front end to the first front end."""
    samples = [
        [sample.name, sample.labels, sample.value, metric.type == _GAUGE]
        for metric in registry.collect()
        if _is_added(metric)
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]
    return {
        "samples": samples,
        "statistics": [message.SerializeToString() for message in statistics],
        "num_running": num_running,
    }


class _Counts:
    """The counts of a front end."""

    def __init__(self, wire: Mapping[str, Any] = _NOTHING) -> None:
        self.samples: _Samples = {}
        self.gauges: _Samples = {}
        for name, labels, value, is_gauge in wire["samples"]:
            kept = self.gauges if is_gauge else self.samples
            kept[_key(name, labels)] = value
        self.statistics: _Statistics = {}
        for raw in wire["statistics"]:
            message = StatisticsMessage.FromString(raw)
            self.statistics[message.name, message.version] = message
        self.num_running = int(wire["num_running"])

    def add(self, more: _Counts) -> None:
        """Add the counters of other front ends; current values are taken from ``others``."""
        _add(self.samples, more.samples)
        for key, message in more.statistics.items():
            _merge(self.statistics.setdefault(key, StatisticsMessage()), message)

    def forget_requests(self, model: str, version: str) -> None:
        """Remove the counts of a model version's requests."""
        self._drop(model, version, lambda name: name.startswith(_REQUESTS))
        self.statistics.pop((model, version), None)

    def forget_engine(self, model: str, version: str) -> None:
        """Remove the counts of a model version's engine."""
        others = tuple(name for name in _ADDED if name != _REQUESTS)
        self._drop(model, version, lambda name: name.startswith(others))

    def _drop(self, model: str, version: str, is_meant: Callable[[str], bool]) -> None:
        wanted = {("model", model), ("version", version)}
        for samples in (self.samples, self.gauges):
            for key in [k for k in samples if is_meant(k[0]) and wanted <= set(k[1])]:
                del samples[key]

    def lacking(self, later: _Counts) -> _Counts:
        """The counts of model versions that are missing in the ``later`` counts."""
        gone = _Counts()
        for key, value in self.samples.items():
            if key not in later.samples and key[0].startswith(_ADDED):
                gone.samples[key] = value
        for version in self.statistics.keys() - later.statistics.keys():
            gone.statistics[version] = self.statistics[version]
        return gone


class OtherCounts:
    """The last counts of each other front end, and the sums of those that died.

    A counter therefore never falls when a front end is restarted, or when models load and
    unload a little earlier or later than here.
    """

    def __init__(self) -> None:
        self._of: dict[int, _Counts] = {}
        self._dead = _Counts()
        self._behind: dict[int, set[tuple[str, str]]] = {}
        """The model versions whose requests count from 0 here, and maybe not yet at others."""

    def take(self, index: int, wire: Mapping[str, Any]) -> None:
        """Replace the counts of a front end. Counts of a model version that the report lacks
        stay until the version is forgotten here.
        """
        before, counts = self._of.get(index), _Counts(wire)
        for model, version in self._behind.setdefault(index, set()):
            counts.forget_requests(model, version)
        if before is not None:
            self._dead.add(before.lacking(counts))
        self._of[index] = counts

    def caught_up(self, index: int, model: str = "") -> None:
        """A front end has reset a model that was reset here; without a name, all models."""
        behind = self._behind.get(index, set())
        behind -= {each for each in behind if model in ("", each[0])}

    def lost(self, index: int) -> None:
        """A front end has ended; its counts stay."""
        self._behind.pop(index, None)
        counts = self._of.pop(index, None)
        if counts is not None:
            self._dead.add(counts)

    def legacy(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The counts that the first front end leaves to its successor: `own_counts`, and those
        of dead front ends. Living front ends report theirs again.
        """
        counts = _Counts(own)
        counts.add(self._dead)
        return {
            "samples": [
                [n, dict(labels), v, False] for (n, labels), v in counts.samples.items()
            ],
            "statistics": [m.SerializeToString() for m in counts.statistics.values()],
            "num_running": 0,
        }

    def inherit(self, legacy: Mapping[str, Any]) -> None:
        """Restore the `legacy` of the previous first front end."""
        self._dead.add(_Counts(legacy))

    def forget_engine(self, model: str, version: str) -> None:
        """The engine of the model version has ended; the next engine counts from 0."""
        for counts in (self._dead, *self._of.values()):
            counts.forget_engine(model, version)

    def forget(self, model: str, version: str) -> None:
        """The requests of the model version count from 0 again."""
        for counts in (self._dead, *self._of.values()):
            counts.forget_requests(model, version)
        for behind in self._behind.values():
            behind.add((model, version))

    @property
    def num_running(self) -> int:
        """Requests that run at other front ends."""
        return sum(counts.num_running for counts in self._of.values())

    def added_to(self, metrics: Iterable[Metric]) -> Iterator[Metric]:
        """The same metrics, with the counts of other front ends added to their samples."""
        added = dict(self._dead.samples)
        for counts in self._of.values():
            _add(added, counts.samples)
            _add(added, counts.gauges)
        for metric in metrics:
            if added and _is_added(metric):
                metric.samples = [
                    sample._replace(
                        value=sample.value + added.get(_key(sample.name, sample.labels), 0.0)
                    )
                    for sample in metric.samples
                ]
            yield metric

    def add_statistics(self, message: StatisticsMessage) -> None:
        """Add the counts of other front ends to the counters of a model version."""
        key = message.name, message.version
        for counts in (self._dead, *self._of.values()):
            if key in counts.statistics:
                _merge(message, counts.statistics[key])


def _is_added(metric: Metric) -> bool:
    return metric.name.startswith(_ADDED) or isinstance(metric, CustomMetric)


def _key(name: str, labels: Mapping[str, str]) -> _Key:
    return name, tuple(sorted(labels.items()))


def _add(total: _Samples, more: _Samples) -> None:
    for key, value in more.items():
        total[key] = total.get(key, 0.0) + value


def _merge(total: StatisticsMessage, part: StatisticsMessage) -> None:
    """Add counters, and merge the batch sizes."""
    total.name, total.version = part.name, part.version
    total.last_inference = max(total.last_inference, part.last_inference)
    total.inference_count += part.inference_count
    total.execution_count += part.execution_count
    for name in ("success", "fail", "queue", "compute_input", "compute_infer",
                 "compute_output", "cache_hit", "cache_miss"):  # fmt: skip
        _add_duration(getattr(total.inference_stats, name), getattr(part.inference_stats, name))
    batches = {batch.batch_size: batch for batch in total.batch_stats}
    for batch in part.batch_stats:
        mine = batches.get(batch.batch_size)
        if mine is None:
            total.batch_stats.add().CopyFrom(batch)
            continue
        for name in ("compute_input", "compute_infer", "compute_output"):
            _add_duration(getattr(mine, name), getattr(batch, name))


def _add_duration(total: Any, part: Any) -> None:
    total.count += part.count
    total.ns += part.ns
