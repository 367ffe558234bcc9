"""The metrics of the engines behind token-level models: ``nv_trt_llm_*`` and our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from prometheus_client.registry import CollectorRegistry

from trimaran.comm.messages.messages import DRAFT_POSITION_KEYS, DRAFT_POSITIONS
from trimaran.server.metrics.backend_samples import EngineSamples
from trimaran.server.metrics.histograms import HistogramFamily, HistogramSeries
from trimaran.server.metrics.other_counts import OtherCounts
from trimaran.server.metrics.recent_rates import Key, ModelCounts, read_counts
from trimaran.server.metrics.step_metrics import GroupSums, StepMetrics

_Info = tuple[str, tuple[str, ...]]
"""The info gauge of a fact, and its labels after model and version."""

_LABELS = ("model", "version")
_START_KEYS = (
    "start_method", "mpi", "world_size", "tp_size", "pp_size", "dp_size", "stages",
)  # fmt: skip
_TOKEN_BUCKETS = (10, 50, 100, 500, 1000)
_FIRST_TOKEN_BUCKETS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
)  # fmt: skip
_INTER_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1, 2.5,
)  # fmt: skip

_LENGTH_HELP, _LENGTH_LABEL = "TRT LLM response metrics", "response_metric_type"
_INPUT_TOKENS, _OUTPUT_TOKENS = "total_input_tokens", "total_output_tokens"

# The other figures of a model's groups are added up.
_MAXIMA = ("kv_tokens_per_block", "micro_batch_id", "timestamp_us")

# Facts that an engine reports: the help and the labels.
_INFOS = {
    "backend": ("Which implementation serves an operator", "operator", "backend"),
    "transport": ("Which transport carries a collective", "collective", "transport"),
    "start_method": ("How the model's ranks were started", *_START_KEYS),
}

# Family: help, label, and the engine statistic of each label value.
_FAMILIES: dict[str, tuple[str, str, dict[str, str]]] = {
    "trimaran_kv_host_blocks": (
        "KV cache blocks in the host's memory: max is the capacity, used blocks hold "
        "content; moved and loaded blocks were copied there and back since the start",
        "type",
        {
            "max": "kv_host_max_blocks",
            "used": "kv_host_used_blocks",
            "moved": "kv_host_moved_blocks",
            "loaded": "kv_host_loaded_blocks",
        },
    ),
    "trimaran_pauses": (
        "Since the start: sequences that lost their KV cache blocks, mostly to other "
        "sequences, and the tokens that were computed again",
        "type",
        {"sequences": "paused_sequences", "tokens": "paused_tokens"},
    ),
    "trimaran_lora_adapters": (
        "LoRA adapters: host counts those cached in the host's memory, device those on the "
        "device, used those of running requests; loaded counts copies to the device",
        "type",
        {
            "host": "lora_host_adapters",
            "device": "lora_device_adapters",
            "used": "lora_used_adapters",
            "loaded": "lora_loaded_adapters",
        },
    ),
    "trimaran_drafts": (
        "Speculative decoding since the start: drafts of one sequence in one step, and their "
        "tokens",
        "type",
        {"drafts": "num_drafts", "tokens": "num_draft_tokens"},
    ),
    "trimaran_accepted_draft_tokens": (
        "Draft tokens since the start that became output, by their place in the draft",
        "position",
        dict(zip(DRAFT_POSITIONS, DRAFT_POSITION_KEYS, strict=True)),
    ),
    "trimaran_late_kernels": (
        "Kernels that rank 0 compiled, or read from the cache of an earlier process, after the "
        "engine's start; each delayed a step",
        "type",
        {"compiled": "num_compiled_kernels", "loaded": "num_loaded_kernels"},
    ),
}


@dataclass(frozen=True, slots=True)
class RequestSeries:
    """The histograms of one model version's requests."""

    first_token: HistogramSeries
    """Seconds from a request's arrival to its first token."""

    inter_token: HistogramSeries
    """Seconds between successive tokens of a sequence."""

    input_tokens: HistogramSeries
    """Prompt lengths of finished requests, in tokens."""

    output_tokens: HistogramSeries
    """Output lengths of finished requests, in tokens."""


class EngineMetrics:
    """All series of the token-level models of one front end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._gauges = {
            name: self._gauge(name, documentation, label)
            for name, (documentation, label, _) in _FAMILIES.items()
        }
        self.samples = EngineSamples(registry)
        """Those of ``nv_trt_llm_*``."""

        length_labels = (*_LABELS, _LENGTH_LABEL)
        self._input_tokens = HistogramFamily(
            "nv_llm_input_token_len", _LENGTH_HELP, length_labels, registry
        )
        self._output_tokens = HistogramFamily(
            "nv_llm_output_token_len", _LENGTH_HELP, length_labels, registry
        )
        self._first_token = HistogramFamily(
            "trimaran_time_to_first_token_seconds",
            "Time from a request's arrival to its first token",
            _LABELS,
            registry,
        )
        self._inter_token = HistogramFamily(
            "trimaran_inter_token_latency_seconds",
            "Time between successive tokens of a sequence",
            _LABELS,
            registry,
        )
        self._info_gauges = {
            name: self._gauge(f"trimaran_{name}_info", f"{what} (value is always 1)", *labels)
            for name, (what, *labels) in _INFOS.items()
        }
        self._group_up = self._gauge(
            "trimaran_group_up", "Whether the worker group serves (1) or not (0)", "group"
        )
        self._group_restarts = self._gauge(
            "trimaran_group_restarts", "Restarts of the worker group so far", "group"
        )
        self._group_requests = self._gauge(
            "trimaran_group_requests", "Requests that the worker group owes tokens", "group"
        )
        self._replays = Counter(
            "trimaran_replayed_requests", "Requests sent again after a group died", _LABELS,
            registry=registry,
        )  # fmt: skip
        self._lost = Counter(
            "trimaran_lost_requests", "Requests that failed because groups died", _LABELS,
            registry=registry,
        )  # fmt: skip
        self._steps = StepMetrics(registry)
        self._sums = GroupSums()
        self._stats: dict[Key, dict[str, Mapping[str, float]]] = {}
        self._latest: dict[Key, dict[str, float]] = {}
        self._infos: dict[Key, dict[str, set[_Info]]] = {}
        self._groups: dict[Key, set[str]] = {}

    def _gauge(self, name: str, documentation: str, *labels: str) -> Gauge:
        return Gauge(name, documentation, (*_LABELS, *labels), registry=self._registry)

    def add_model(self, model: str, version: str) -> None:
        """Show the model's series, with value 0 if they are new."""
        self._show_stats((model, version))
        self.request_series(model, version)
        self._replays.labels(model, version)
        self._lost.labels(model, version)
        self._steps.add_model(model, version)

    def remove_model(self, model: str, version: str) -> None:
        """Remove the model's series. A model that is added again begins at 0."""
        key = model, version
        for group in {*self._groups.get(key, ()), *self._infos.get(key, ())}:
            self.remove_group(model, version, group)
        for known in (self._groups, self._infos, self._stats, self._latest):
            known.pop(key, None)
        self._sums.remove_model(key)
        self.samples.remove(key)
        for name, (_, _, keys) in _FAMILIES.items():
            for label in keys:
                self._gauges[name].remove(model, version, label)
        self._input_tokens.remove(model, version, _INPUT_TOKENS)
        self._output_tokens.remove(model, version, _OUTPUT_TOKENS)
        self._first_token.remove(model, version)
        self._inter_token.remove(model, version)
        self._replays.remove(model, version)
        self._lost.remove(model, version)
        self._steps.remove_model(model, version)

    def remove_group(self, model: str, version: str, group: str) -> None:
        """Remove the series of one worker group."""
        key = model, version
        self._groups.get(key, set()).discard(group)
        self._group_up.remove(model, version, group)
        self._group_restarts.remove(model, version, group)
        self._group_requests.remove(model, version, group)
        self._set_infos(key, group, set())
        self.set_stats(model, version, {}, group)
        self._sums.remove_group(key, group)

    def set_stats(
        self,
        model: str,
        version: str,
        stats: Mapping[str, float],
        group: str = "",
        incarnation: int = 0,
    ) -> None:
        """Show the statistics of a group's last iteration beside those of the model's other
        groups; missing keys count as 0. ``incarnation`` is the number of restarts.
        """
        groups = self._stats.setdefault((model, version), {})
        groups[group] = stats
        if stats:
            self._steps.add(model, version, group, stats, incarnation)
            self._sums.add((model, version), group, stats, incarnation)
        else:
            del groups[group]
        self._show_stats((model, version))

    def _show_stats(self, key: Key) -> None:
        """Show the sums over all groups of a model."""
        values = _together(list(self._stats.get(key, {}).values()))
        values.update(self._sums.totals(key))
        num_blocks = values.get("kv_max_blocks", 0)
        used = values.get("kv_used_blocks", 0)
        values["kv_used_fraction"] = used / num_blocks if num_blocks else 0.0
        self._latest[key] = values
        self.samples.show(key, values)
        for name, (_, _, keys) in _FAMILIES.items():
            for label, stat in keys.items():
                self._gauges[name].labels(*key, label).set(values.get(stat, 0))

    def set_info(
        self, model: str, version: str, facts: Mapping[str, Any], group: str = ""
    ) -> None:
        """Show the facts of a group's engine, in place of earlier facts."""
        start = tuple(str(facts.get(key, "")) for key in _START_KEYS)
        infos: set[_Info] = {("start_method", start)}
        for name, fact in (("backend", "backends"), ("transport", "transports")):
            infos |= {(name, (key, str(value))) for key, value in facts.get(fact, {}).items()}
        self._set_infos((model, version), group, infos)

    def _set_infos(self, key: Key, group: str, infos: set[_Info]) -> None:
        groups = self._infos.setdefault(key, {})
        before = set().union(*groups.values())
        groups[group] = infos
        now = set().union(*groups.values())
        for name, labels in before - now:
            self._info_gauges[name].remove(*key, *labels)
        for name, labels in now - before:
            self._info_gauges[name].labels(*key, *labels).set(1)
        if not infos:
            del groups[group]

    def set_group(
        self, model: str, version: str, group: str, *, up: bool, restarts: int
    ) -> None:
        """Show whether a worker group serves."""
        self._groups.setdefault((model, version), set()).add(group)
        self._group_up.labels(model, version, group).set(int(up))
        self._group_restarts.labels(model, version, group).set(restarts)

    def count_group(
        self, model: str, version: str, group: str, num_requests: Callable[[], int]
    ) -> None:
        """Show the value that ``num_requests`` returns at each scrape."""
        self._groups.setdefault((model, version), set()).add(group)
        self._group_requests.labels(model, version, group).set_function(num_requests)

    def count_replays(self, model: str, version: str, num_replays: int) -> None:
        """Add requests that were sent again."""
        self._replays.labels(model, version).inc(num_replays)

    def count_lost(self, model: str, version: str, num_requests: int) -> None:
        """Add requests that failed because groups died."""
        self._lost.labels(model, version).inc(num_requests)

    def request_series(self, model: str, version: str) -> RequestSeries:
        """The series of a model version's requests, with value 0 if they are new."""
        key = model, version
        return RequestSeries(
            self._first_token.series(key, _FIRST_TOKEN_BUCKETS),
            self._inter_token.series(key, _INTER_TOKEN_BUCKETS),
            self._input_tokens.series((*key, _INPUT_TOKENS), _TOKEN_BUCKETS),
            self._output_tokens.series((*key, _OUTPUT_TOKENS), _TOKEN_BUCKETS),
        )

    def token_totals(self, model: str, version: str) -> dict[str, float]:
        """Tokens of all requests that this front end has finished, by direction."""
        series = self.request_series(model, version)
        return {
            _INPUT_TOKENS: series.input_tokens.sum,
            _OUTPUT_TOKENS: series.output_tokens.sum,
        }

    def latency_counts(self, others: OtherCounts) -> dict[Key, ModelCounts]:
        """The latency histograms' cumulative counts now, with those of other front ends."""
        return read_counts(
            others.added_to(self._first_token.collect()),
            others.added_to(self._inter_token.collect()),
        )

    def values(self, model: str, version: str) -> Mapping[str, float] | None:
        """The engine's last statistics; None for a model without an engine."""
        return self._latest.get((model, version))

    def load_header(self, style: str) -> str | None:
        """The value of the ``endpoint-load-metrics`` header, over all engines of this endpoint;
        None if the style or the statistics are unknown.
        """
        engines = [values for values in self._latest.values() if values.get("kv_max_blocks")]
        if not engines:
            return None
        num_blocks = sum(values["kv_max_blocks"] for values in engines)
        utilization = sum(values.get("kv_used_blocks", 0) for values in engines) / num_blocks
        capacity = int(
            sum(v["kv_max_blocks"] * v.get("kv_tokens_per_block", 0) for v in engines)
        )
        if style == "text":
            return (
                f"TEXT named_metrics.kv_cache_utilization={utilization:.6f}, "
                f"named_metrics.max_token_capacity={capacity}"
            )
        if style == "json":
            return (
                'JSON {"named_metrics":{"kv_cache_utilization":'
                f'{utilization:g},"max_token_capacity":{capacity}}}}}'
            )
        return None


def _together(groups: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The statistics of all groups of a model, as of a single engine."""
    values: dict[str, float] = {}
    for stats in groups:
        for key, value in stats.items():
            before = values.get(key, 0)
            values[key] = max(before, value) if key in _MAXIMA else before + value
    return values
