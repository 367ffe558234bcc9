"""The metric on where an engine's time goes: seconds by part of a step."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter
from prometheus_client.registry import CollectorRegistry

PARTS = ("receive", "schedule", "launch", "wait", "emit", "device", "sample")
"""The first five are the host's loop and add up to its time with work; ``device`` is the
model and ``sample`` the sampler where they run. Engines report each as ``PART_seconds``."""


class StepMetrics:
    """One counter a part of each model, over all of its groups and their restarts."""

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
        """Show nothing more of the model. Added again, it begins at 0."""
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
        """Count what a group's sums have grown by since they were seen last, as `GroupSums`
        does."""
        seen = self._seen.setdefault((model, version), {})
        before = seen.get(group, stats if incarnation else {})
        for part in PARTS:
            key = f"{part}_seconds"
            now, then = stats.get(key, 0.0), before.get(key, 0.0)
            self._seconds.labels(model, version, part).inc(now - then if now >= then else now)
        seen[group] = stats
