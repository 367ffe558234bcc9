"""The samples of ``nv_trt_llm_*`` and the iteration line of the log, as the version of Triton's
TensorRT-LLM backend has them whose repository is served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

from prometheus_client.core import Metric
from prometheus_client.registry import CollectorRegistry

from trimaran.server.metrics.recent_rates import Key

NEWEST = 18
"""Second number of the newest version whose samples differ from those before."""

OLDEST = 6
"""Second number of the first version with ``nv_trt_llm_*``."""

# An engine shows one of the first two families, by its batching type.
_IN_FLIGHT, _V1 = "nv_trt_llm_inflight_batcher_metrics", "nv_trt_llm_v1_metrics"
_TRANSFERS = "nv_trt_llm_disaggregated_serving_metrics"

# Family: help, label, and the engine statistic of each label value.
_FAMILIES: dict[str, tuple[str, str, dict[str, str]]] = {
    "nv_trt_llm_request_metrics": (
        "TRT LLM request metrics",
        "request_type",
        {
            "active": "active_requests",
            "max": "max_requests",
            "scheduled": "scheduled_requests",
            "context": "context_requests",
            "waiting": "waiting_requests",
        },
    ),
    "nv_trt_llm_runtime_memory_metrics": (
        "TRT LLM runtime memory metrics",
        "memory_type",
        {
            "cpu": "cpu_memory_bytes",
            "gpu": "gpu_memory_bytes",
            "pinned": "pinned_memory_bytes",
        },
    ),
    "nv_trt_llm_kv_cache_block_metrics": (
        "TRT LLM KV cache block metrics",
        "kv_cache_block_type",
        {
            "max": "kv_max_blocks",
            "free": "kv_free_blocks",
            "used": "kv_used_blocks",
            "tokens_per": "kv_tokens_per_block",
            "reused": "kv_reused_blocks",
            "fraction": "kv_used_fraction",
        },
    ),
    _IN_FLIGHT: (
        "TRT LLM inflight_batcher-specific metrics",
        "inflight_batcher_specific_metric",
        {
            "total_context_tokens": "total_context_tokens",
            "generation_requests": "generation_requests",
            "micro_batch_id": "micro_batch_id",
            "paused_requests": "paused_requests",
            "terminated_requests": "paused_requests",
        },
    ),
    _V1: (
        "TRT LLM v1-specific metrics",
        "v1_specific_metric",
        {
            "total_context_tokens": "total_context_tokens",
            "total_generation_tokens": "total_generation_tokens",
            "empty_generation_slots": "empty_generation_slots",
        },
    ),
    "nv_trt_llm_general_metrics": (
        "General TRT LLM metrics",
        "general_type",
        {"timestamp": "timestamp_us", "iteration_counter": "iteration_counter"},
    ),
    # No request is disaggregated: the engine has no such statistics, and the counts stay 0.
    _TRANSFERS: (
        "TRT LLM disaggregated serving metrics",
        "disaggregated_serving_type",
        {"kv_cache_transfer_ms": "kv_cache_transfer_ms", "request_count": "kv_transfers"},
    ),
}

_LOG_NAMES = {
    "active": "Active Request Count",
    "max": "Max Request Count",
    "scheduled": "Scheduled Requests",
    "context": "Context Requests",
    "waiting": "Waiting Requests",
    "cpu": "Runtime CPU Memory Usage",
    "gpu": "Runtime GPU Memory Usage",
    "pinned": "Runtime Pinned Memory Usage",
    "free": "Free KV cache blocks",
    "used": "Used KV cache blocks",
    "tokens_per": "Tokens per KV cache block",
    "reused": "Reused KV cache blocks",
    "fraction": "Fraction used KV cache blocks",
    "total_context_tokens": "Total Context Tokens",
    "generation_requests": "Generation Requests",
    "micro_batch_id": "MicroBatch ID",
    "paused_requests": "Paused Requests",
    "terminated_requests": "Terminated Requests",
    "total_generation_tokens": "Total Generation Tokens",
    "empty_generation_slots": "Empty Generation Slots",
    "timestamp": "Timestamp",
    "iteration_counter": "Iteration Counter",
    "kv_cache_transfer_ms": "KV cache transfer time",
    "request_count": "Request count",
}
_MAX_BLOCKS = "Max KV cache blocks"

# The versions between which a sample exists, where not in all.
_SINCE = {
    "terminated_requests": 8,
    "paused_requests": 10,
    "reused": 13,
    "kv_cache_transfer_ms": 15,
    "request_count": 15,
    "waiting": 18,
    "fraction": 18,
}
_UNTIL = {"terminated_requests": 9}
_STATISTICS_UNTIL = 6
"""Families were named ``nv_trt_llm_*_statistics``."""

_SECONDS_UNTIL = 11
"""The time stamp was in seconds, in the log too."""


@dataclass(frozen=True, slots=True)
class BackendSamples:
    """What version 0.``minor`` shows of an engine."""

    minor: int = NEWEST

    def name(self, family: str) -> str:
        """The version's name of a family."""
        is_old = self.minor <= _STATISTICS_UNTIL
        return family.removesuffix("_metrics") + "_statistics" if is_old else family

    def shown(self, stats: Mapping[str, float]) -> Iterator[tuple[str, str, float]]:
        """Family, label value and value of each sample for an engine's statistics; missing
        statistics count as 0.
        """
        absent = _IN_FLIGHT if stats.get("v1_batching") else _V1
        for family, (_, _, labels) in _FAMILIES.items():
            for label, statistic in labels.items():
                if family != absent and self._has(label):
                    yield family, label, self._value(label, stats, statistic)

    def log_values(self, stats: Mapping[str, float]) -> dict[str, object]:
        """The values of the iteration line of the log: one for each sample."""
        values: dict[str, object] = {}
        for family, label, value in self.shown(stats):
            is_capacity = label == "max" and "kv_cache" in family
            name = _MAX_BLOCKS if is_capacity else _LOG_NAMES[label]
            values[name] = value if label == "fraction" else int(value)
        moment = datetime.fromtimestamp(stats.get("timestamp_us", 0) / 1e6, timezone.utc)
        form = "%m-%d-%Y %H:%M:%S" + ("" if self.minor <= _SECONDS_UNTIL else ".%f")
        values[_LOG_NAMES["timestamp"]] = moment.strftime(form)
        return values

    def _has(self, label: str) -> bool:
        return _SINCE.get(label, OLDEST) <= self.minor <= _UNTIL.get(label, NEWEST)

    def _value(self, label: str, stats: Mapping[str, float], statistic: str) -> float:
        value = stats.get(statistic, 0)
        if label == "fraction":
            num_blocks = stats.get("kv_max_blocks", 0)
            return stats.get("kv_used_blocks", 0) / num_blocks if num_blocks else 0.0
        if label == "timestamp" and self.minor <= _SECONDS_UNTIL:
            return value // 1_000_000
        return value


class EngineSamples:
    """All samples of ``nv_trt_llm_*``: those of each model as the version of its repository
    has them.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._versions: dict[Key, BackendSamples] = {}
        self._stats: dict[Key, Mapping[str, float]] = {}
        registry.register(self)

    def set_version(self, key: Key, minor: int) -> None:
        """Show a model's samples from now on as version 0.``minor`` does."""
        self._versions[key] = BackendSamples(minor)

    def of(self, key: Key) -> BackendSamples:
        """The version of a model's samples."""
        return self._versions.get(key, _LATEST)

    def show(self, key: Key, stats: Mapping[str, float]) -> None:
        """Show these statistics of a model's engine."""
        self._stats[key] = stats

    def remove(self, key: Key) -> None:
        """Remove the samples of a model, and its version."""
        self._stats.pop(key, None)
        self._versions.pop(key, None)

    def collect(self) -> Iterator[Metric]:
        """`prometheus_client` collects samples here."""
        families: dict[str, Metric] = {}
        for key, stats in self._stats.items():
            version = self.of(key)
            for family, label, value in version.shown(stats):
                name = version.name(family)
                help_text, label_name, _ = _FAMILIES[family]
                kind = "counter" if family == _TRANSFERS else "gauge"
                metric = families.setdefault(name, Metric(name, help_text, kind))
                labels = {"model": key[0], "version": key[1], label_name: label}
                metric.add_sample(name, labels, value)
        yield from families.values()


_LATEST = BackendSamples()
