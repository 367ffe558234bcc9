"""Histograms that requests fill: an observation takes a fifth of `prometheus_client`'s time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry


class HistogramSeries:
    """The values of one series. Used on the event loop only, and therefore without locks."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds`` are rising upper bounds of the buckets; a last bucket has none."""
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add ``count`` values that are equal."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    @property
    def sum(self) -> float:
        """The sum of all values."""
        return self._sum

    def buckets(self) -> list[tuple[str, float]]:
        """The number of values up to each bound, with the bound as text."""
        found, total = [], 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            found.append((str(bound), float(total)))
        return found


class HistogramFamily:
    """The histograms of one name, by labels; their buckets may differ."""

    def __init__(
        self,
        name: str,
        documentation: str,
        label_names: Sequence[str],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._label_names = tuple(label_names)
        self._series: dict[tuple[str, ...], HistogramSeries] = {}
        registry.register(self)

    def series(self, labels: Sequence[str], bounds: Sequence[float]) -> HistogramSeries:
        """The series with these labels, which begins at 0 if it is new. ``bounds`` are those of
        a new series.
        """
        key = tuple(labels)
        found = self._series.get(key)
        if found is None:
            found = self._series[key] = HistogramSeries(bounds)
        return found

    def remove(self, *labels: str) -> None:
        """Remove a series, if it exists. The series begins at 0 if it is made again."""
        self._series.pop(labels, None)

    def collect(self) -> Iterator[Metric]:
        """`prometheus_client` collects samples here."""
        family = HistogramMetricFamily(
            self._name, self._documentation, labels=self._label_names
        )
        for labels, series in self._series.items():
            family.add_metric(labels, series.buckets(), series.sum)
        yield family
