"""Counters and histograms for the event loop: no locks, because only one thread counts.

A value of `prometheus_client` takes a lock for each addition, and its histogram searches the
buckets one by one: a front end adds several values a token and thirty a request.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from prometheus_client.core import Metric
from prometheus_client.registry import CollectorRegistry


class CounterSeries:
    """One series of a `LoopCounter`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add ``amount``, which is not negative."""
        self.value += amount


class HistogramSeries:
    """One series of a `LoopHistogram`."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * len(bounds)
        """Observations of each bucket alone."""
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add ``count`` observations of one value."""
        self.total += value * count
        self.counts[bisect_left(self._bounds, value)] += count


SeriesT = TypeVar("SeriesT", CounterSeries, HistogramSeries)


class _Family(Generic[SeriesT]):
    """The series of one name by their label values."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str]) -> None:
        self.name = name
        self.documentation = documentation
        self._label_names = tuple(labels)
        self._series: dict[tuple[str, ...], SeriesT] = {}

    def remove(self, *values: str) -> None:
        """Remove a series; one that is added later begins at 0."""
        self._series.pop(values, None)

    def _labelled(self) -> Iterator[tuple[dict[str, str], SeriesT]]:
        for values, series in self._series.items():
            yield dict(zip(self._label_names, values, strict=True)), series


class LoopCounter(_Family[CounterSeries]):
    """A counter family, collected like one of `prometheus_client`."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        super().__init__(name, documentation, labels)
        registry.register(self)

    def labels(self, *values: str) -> CounterSeries:
        """The series of these label values, with value 0 if it is new."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = CounterSeries()
        return series

    def collect(self) -> Iterator[Metric]:
        """`prometheus_client` collects samples here."""
        metric = Metric(self.name, self.documentation, "counter")
        for labels, series in self._labelled():
            metric.add_sample(f"{self.name}_total", labels, float(series.value))
        yield metric


class LoopHistogram(_Family[HistogramSeries]):
    """A histogram family, collected like one of `prometheus_client`."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        buckets: Sequence[float],
        registry: CollectorRegistry | None,
    ) -> None:
        """``buckets`` are upper bounds, ascending; the bound +Inf is added where it lacks.
        Without a ``registry`` somebody else collects the family.
        """
        super().__init__(name, documentation, labels)
        bounds = tuple(map(float, buckets))
        self._bounds = bounds if math.isinf(bounds[-1]) else (*bounds, math.inf)
        if registry is not None:
            registry.register(self)

    def labels(self, *values: str) -> HistogramSeries:
        """The series of these label values, without observations if it is new."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = HistogramSeries(self._bounds)
        return series

    def collect(self) -> Iterator[Metric]:
        """`prometheus_client` collects samples here."""
        metric, name = Metric(self.name, self.documentation, "histogram"), self.name
        for labels, series in self._labelled():
            count = 0
            for bound, of_bucket in zip(self._bounds, series.counts, strict=True):
                count += of_bucket
                below = {**labels, "le": "+Inf" if math.isinf(bound) else str(bound)}
                metric.add_sample(f"{name}_bucket", below, float(count))
            metric.add_sample(f"{name}_count", labels, float(count))
            metric.add_sample(f"{name}_sum", labels, series.total)
        yield metric
