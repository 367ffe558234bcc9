"""The metrics on how evenly tokens fall to the experts of a model's layers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import Metric
from prometheus_client.registry import CollectorRegistry

from trimaran.comm.messages.messages import ExpertReport

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
        """Show nothing more of the model. Added again, it begins at 0."""
        key = model, version
        self._totals.pop(key, None)
        for known in [known for known in self._seen if known[0] == key]:
            del self._seen[known]

    def add(
        self, model: str, version: str, group: str, report: ExpertReport, incarnation: int = 0
    ) -> None:
        """Count what a group's sums have grown by since they were seen last, as `GroupSums`
        does."""
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
        """The registry's question for samples."""
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
