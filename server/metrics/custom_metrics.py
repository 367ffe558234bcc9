"""Metrics that user code of Python models defines, among the server's metrics."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import CollectorRegistry

from trimaran.comm.errors import RequestError

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED = ("nv_", "trimaran_")

Labels = tuple[tuple[str, str], ...]


class CustomMetric(Metric):
    """A family whose values are added up over front ends."""


@dataclass(slots=True)
class _Series:
    """One counter, gauge or histogram, and the number of `Metric` objects that use it."""

    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets; the last bucket has none."""
    value: float = 0.0
    """A histogram's sum."""
    counts: list[int] = field(default_factory=list)
    num_holders: int = 0

    def observe(self, value: float) -> None:
        """Add a value to a histogram."""
        self.value += value
        self.counts[bisect.bisect_left(self.bounds, value)] += 1


@dataclass(slots=True)
class _Family:
    description: str
    kind: str
    series: dict[Labels, _Series] = field(default_factory=dict)


class CustomMetrics:
    """All series by family and labels. A series is removed with its last `Metric` object.

    Used on the event loop only.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families: dict[str, _Family] = {}
        registry.register(self)

    def hold(
        self,
        name: str,
        description: str,
        kind: str,
        labels: Labels,
        bounds: tuple[float, ...] = (),
    ) -> None:
        """Show a series from now on; an existing series is shared.

        Raises:
            RequestError: the name is taken by a family of another kind or by the server; the
                name or a label's name is malformed; or a histogram's bounds do not rise.
        """
        _check(name, kind, labels, bounds)
        family = self._families.setdefault(name, _Family(description, kind))
        if family.kind != kind:
            raise RequestError(
                f"metric family '{name}' is a {family.kind} already and cannot be a {kind}"
            )
        series = family.series.setdefault(labels, _Series(bounds))
        if series.bounds != bounds:
            raise RequestError(
                f"metric family '{name}' has these labels with the buckets "
                f"{list(series.bounds)} already, not {list(bounds)}"
            )
        series.counts = series.counts or [0] * (len(bounds) + 1)
        series.num_holders += 1

    def release(self, name: str, labels: Labels) -> None:
        """Undo one `hold`."""
        family = self._families[name]
        series = family.series[labels]
        series.num_holders -= 1
        if not series.num_holders:
            del family.series[labels]
        if not family.series:
            del self._families[name]

    def add(self, name: str, labels: Labels, amount: float) -> None:
        """Raise or lower a series that is held."""
        self._families[name].series[labels].value += amount

    def observe(self, name: str, labels: Labels, value: float) -> None:
        """Add a value to a histogram that is held."""
        self._families[name].series[labels].observe(value)

    def set(self, name: str, labels: Labels, value: float) -> None:
        """Set a series that is held."""
        self._families[name].series[labels].value = value

    def value(self, name: str, labels: Labels) -> float:
        """The value of a series that is held."""
        return self._families[name].series[labels].value

    def collect(self) -> Iterator[Metric]:
        """`prometheus_client` collects samples here."""
        for name, family in self._families.items():
            metric = CustomMetric(name, family.description, family.kind)
            for labels, series in family.series.items():
                _add_samples(metric, dict(labels), series)
            yield metric


def _check(name: str, kind: str, labels: Labels, bounds: tuple[float, ...]) -> None:
    """Refuse names that belong to the server or would break the exposition format."""
    if name.startswith(_RESERVED):
        raise RequestError(
            f"metric family '{name}': names that begin with {' or '.join(_RESERVED)} are "
            "the server's own. Choose another."
        )
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"metric family '{name}': a name has letters, digits, '_' and ':' and begins "
            "with no digit"
        )
    for label, _ in labels:
        if not _LABEL.fullmatch(label) or (label == "le" and kind == "histogram"):
            raise RequestError(
                f"metric family '{name}' has the label '{label}': a label has letters, "
                "digits and '_', begins with no digit and not with '__', and is not 'le' "
                "in a histogram"
            )
    if list(bounds) != sorted(set(bounds)):
        raise RequestError(
            f"metric family '{name}' has the buckets {list(bounds)}, which do not rise"
        )


def _add_samples(metric: Metric, labels: dict[str, str], series: _Series) -> None:
    name = metric.name
    if metric.type != "histogram":
        # The renderer removes the suffix again.
        suffix = "_total" if metric.type == "counter" else ""
        metric.add_sample(name + suffix, labels, series.value)
        return
    total = 0
    for bound, count in zip((*series.bounds, math.inf), series.counts, strict=True):
        total += count
        end = "+Inf" if bound == math.inf else f"{bound:g}"
        metric.add_sample(f"{name}_bucket", {**labels, "le": end}, total)
    metric.add_sample(f"{name}_count", labels, total)
    metric.add_sample(f"{name}_sum", labels, series.value)


class HeldMetrics:
    """The metrics of one process; all are removed when the process ends."""

    def __init__(self, metrics: CustomMetrics) -> None:
        self._metrics = metrics
        self._held: dict[int, tuple[str, Labels]] = {}

    def hold(self, number: int, family: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        """Show a series under the number that the process chose.

        Raises:
            RequestError: as for `CustomMetrics.hold`.
        """
        key = tuple(sorted((str(k), str(v)) for k, v in labels.items()))
        bounds = tuple(family["bounds"])
        name, description = family["name"], family["description"]
        self._metrics.hold(name, description, family["kind"], key, bounds)
        self._held[number] = name, key

    def change(self, number: int, verb: str, amount: float) -> None:
        """Execute ``add``, ``set``, ``observe`` or ``drop``."""
        series = self._held.get(number)
        if series is None:
            return
        if verb == "add":
            self._metrics.add(*series, amount)
        elif verb == "set":
            self._metrics.set(*series, amount)
        elif verb == "observe":
            self._metrics.observe(*series, amount)
        else:
            del self._held[number]
            self._metrics.release(*series)

    def value(self, number: int) -> float:
        """The value of a series that is held."""
        return self._metrics.value(*self._held[number])

    def drop_all(self) -> None:
        """The process has ended."""
        held, self._held = list(self._held.values()), {}
        for series in held:
            self._metrics.release(*series)
