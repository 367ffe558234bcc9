"""Seconds of engine steps by part, and sums that survive restarts of engines."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter
from prometheus_client.registry import CollectorRegistry

from trimaran.comm.messages.messages import DRAFT_POSITION_KEYS

PARTS = ("receive", "schedule", "launch", "wait", "emit", "device", "sample")
"""The first five are the host's loop and add up to its time with work; ``device`` is the
model and ``sample`` the sampler where they run; a graph that holds both counts as ``device``.
Engines report each as ``PART_seconds``."""


class StepMetrics:
    """One counter for each part and model, over all groups and their restarts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Counter(
            "trimaran_engine_seconds",
            "Time of an engine's steps by part",
            ("model", "version", "part"),
            registry=registry,
        )
        self._seen: dict[tuple[str, str], dict[str, Mapping[str, float]]] = {}

    def add_model(self, model: str, version: str) -> None:
        """Show the model's series."""
        self._seen.setdefault((model, version), {})
        for part in PARTS:
            self._seconds.labels(model, version, part)

    def remove_model(self, model: str, version: str) -> None:
        """Remove the model's series. A model that is added again begins at 0."""
        self._seen.pop((model, version), None)
        for part in PARTS:
            self._seconds.remove(model, version, part)

    def add(
        self,
        model: str,
        version: str,
        group: str,
        stats: Mapping[str, float],
        incarnation: int = 0,
    ) -> None:
        """Add the increase of a group's sums since the last report, as `GroupSums` does."""
        seen = self._seen.setdefault((model, version), {})
        before = seen.get(group, stats if incarnation else {})
        for part in PARTS:
            key = f"{part}_seconds"
            now, then = stats.get(key, 0.0), before.get(key, 0.0)
            self._seconds.labels(model, version, part).inc(now - then if now >= then else now)
        seen[group] = stats


_Key = tuple[str, str]

SUMS = (
    "iteration_counter", "paused_sequences", "paused_tokens", "kv_host_moved_blocks",
    "kv_host_loaded_blocks", "lora_loaded_adapters", "num_drafts", "num_draft_tokens",
    *DRAFT_POSITION_KEYS, "num_compiled_kernels", "num_loaded_kernels",
)  # fmt: skip
"""The keys of `comm.messages.STATS_KEYS` whose values only grow while an engine lives."""


class GroupSums:
    """The `SUMS` of each model, over all groups and their restarts.

    A plain sum over living groups would fall whenever a group dies. A rate over a fallen
    counter counts everything again.
    """

    def __init__(self) -> None:
        self._totals: dict[_Key, dict[str, float]] = {}
        self._seen: dict[_Key, dict[str, Mapping[str, float]]] = {}

    def add(
        self, key: _Key, group: str, stats: Mapping[str, float], incarnation: int = 0
    ) -> None:
        """Add the increase of a group's sums since the last report.

        A restarted group begins at 0; a group that only lost its connection goes on. A group
        that is first seen in a later ``incarnation`` counts from its current values: the
        previous front end had shown the earlier ones. A counter that resumed below its old
        value would look like a reset and a jump.
        """
        totals = self._totals.setdefault(key, dict.fromkeys(SUMS, 0.0))
        seen = self._seen.setdefault(key, {})
        before = seen.get(group, stats if incarnation else {})
        for name in SUMS:
            now, then = stats.get(name, 0.0), before.get(name, 0.0)
            totals[name] += now - then if now >= then else now
        seen[group] = stats

    def totals(self, key: _Key) -> Mapping[str, float]:
        """The sums of a model; empty before the first report of a group."""
        return self._totals.get(key, {})

    def remove_group(self, key: _Key, group: str) -> None:
        """Another group of this name begins at 0."""
        self._seen.get(key, {}).pop(group, None)

    def remove_model(self, key: _Key) -> None:
        """A model that is added again begins at 0."""
        self._totals.pop(key, None)
        self._seen.pop(key, None)
