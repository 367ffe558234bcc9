"""Rates and latencies of the last minute, from the latency histograms, in bounded memory."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

Key = tuple[str, str]
"""Model and version."""

_RATE_WINDOW_S = 10.0
_QUANTILE_WINDOW_S = 60.0
SAMPLE_PERIOD_S = 2.0


@dataclass(frozen=True, slots=True)
class Counts:
    """One histogram's cumulative counts, by upper bound in seconds."""

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        """Observations so far."""
        return self.counts[-1] if self.counts else 0.0

    def since(self, before: Counts) -> Counts:
        """The observations after ``before``; all of them if the histogram was reset."""
        if before.bounds != self.bounds or before.total > self.total:
            return self
        pairs = zip(self.counts, before.counts, strict=True)
        return Counts(self.bounds, tuple(now - then for now, then in pairs))

    def quantile(self, fraction: float) -> float | None:
        """The value below which ``fraction`` of the observations lie, in seconds.

        Linear inside a bucket, as Prometheus' histogram_quantile; the last finite bound for
        values beyond it. None without observations.
        """
        if not self.total:
            return None
        rank = fraction * self.total
        index = bisect_left(self.counts, rank)
        if index >= len(self.bounds) - 1:
            return self.bounds[-2]
        low = self.bounds[index - 1] if index else 0.0
        below = self.counts[index - 1] if index else 0.0
        within = self.counts[index] - below
        part = (rank - below) / within if within else 1.0
        return low + (self.bounds[index] - low) * part


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """The two latency histograms of one model at one moment."""

    first_token: Counts = field(default_factory=Counts)
    inter_token: Counts = field(default_factory=Counts)

    @property
    def num_tokens(self) -> float:
        """Output tokens so far: the first token of each sequence and all later tokens."""
        return self.first_token.total + self.inter_token.total


@dataclass(frozen=True, slots=True)
class Rates:
    """One model's recent rates and latencies in seconds; None without observations."""

    tokens_per_s: float
    first_token_p50_s: float | None
    first_token_p99_s: float | None
    inter_token_p50_s: float | None
    inter_token_p99_s: float | None


class RecentRates:
    """A minute of snapshots of cumulative counts. Used on the event loop only."""

    def __init__(self) -> None:
        self._snapshots: deque[tuple[float, Mapping[Key, ModelCounts]]] = deque()

    def add(self, counts: Mapping[Key, ModelCounts], now: float | None = None) -> None:
        """Keep one snapshot, and drop all but the youngest of those older than the window."""
        now = time.monotonic() if now is None else now
        self._snapshots.append((now, counts))
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= now - _QUANTILE_WINDOW_S:
            self._snapshots.popleft()

    def rates(self, key: Key) -> Rates:
        """One model's rates and latencies up to the last snapshot."""
        if not self._snapshots:
            return Rates(0.0, None, None, None, None)
        at, latest = self._snapshots[-1]
        now = latest.get(key, ModelCounts())
        long_ago = self._before(key, at - _QUANTILE_WINDOW_S)[1]
        then, recent = self._before(key, at - _RATE_WINDOW_S)
        elapsed_s = at - then
        first = now.first_token.since(long_ago.first_token)
        inter = now.inter_token.since(long_ago.inter_token)
        num_tokens = max(0.0, now.num_tokens - recent.num_tokens)
        return Rates(
            tokens_per_s=num_tokens / elapsed_s if elapsed_s > 0 else 0.0,
            first_token_p50_s=first.quantile(0.5),
            first_token_p99_s=first.quantile(0.99),
            inter_token_p50_s=inter.quantile(0.5),
            inter_token_p99_s=inter.quantile(0.99),
        )

    def _before(self, key: Key, moment: float) -> tuple[float, ModelCounts]:
        """The last snapshot up to ``moment``, else the first one."""
        found = self._snapshots[0]
        for snapshot in self._snapshots:
            if snapshot[0] > moment:
                break
            found = snapshot
        return found[0], found[1].get(key, ModelCounts())


def read_counts(first: Iterable[Metric], inter: Iterable[Metric]) -> dict[Key, ModelCounts]:
    """A snapshot of the time-to-first-token and the inter-token histogram."""
    firsts, inters = _by_model(first), _by_model(inter)
    return {
        key: ModelCounts(firsts.get(key, Counts()), inters.get(key, Counts()))
        for key in {*firsts, *inters}
    }


def _by_model(histogram: Iterable[Metric]) -> dict[Key, Counts]:
    buckets: dict[Key, list[tuple[float, float]]] = {}
    for sample in _samples(histogram):
        if sample.name.endswith("_bucket"):
            key = (sample.labels["model"], sample.labels["version"])
            buckets.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
    return {
        key: Counts(tuple(bound for bound, _ in rows), tuple(count for _, count in rows))
        for key, rows in buckets.items()
    }


def _samples(histogram: Iterable[Metric]) -> Iterable[Sample]:
    for metric in histogram:
        yield from metric.samples
