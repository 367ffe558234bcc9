"""The counters and gauges of ``triton_python_backend_utils``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from trimaran.server.python_models.inference_request import ask
from trimaran.server.python_models.link import the_link
from trimaran.server.python_models.tensors import TritonModelException
from trimaran.server.python_models.wire import COUNTER, GAUGE, MetricChange

_numbers = itertools.count(1)


class Metric:
    """One series, which ends with the last object that stands for it in any process."""

    def __init__(self, family: MetricFamily, labels: Mapping[str, str]) -> None:
        """Show the series.

        Raises:
            TritonModelException: the family's name is taken.
        """
        self._kind = family.wire["kind"]
        self._number = next(_numbers)
        ask("metric_hold", metric=self._number, family=family.wire, labels=dict(labels))

    def increment(self, value: float) -> None:
        """Add to it.

        Raises:
            TritonModelException: a counter would fall.
        """
        if self._kind == COUNTER and value < 0:
            raise TritonModelException(f"a counter cannot be incremented by {value}, below 0")
        self._change("add", value)

    def set(self, value: float) -> None:
        """Set it.

        Raises:
            TritonModelException: it is a counter.
        """
        if self._kind != GAUGE:
            raise TritonModelException("a counter cannot be set; use a GAUGE, or increment()")
        self._change("set", value)

    def value(self) -> float:
        """What it is now, with what other processes made of it."""
        return float(ask("metric_value", metric=self._number)["value"])

    def _change(self, verb: str, amount: float) -> None:
        the_link().send(MetricChange(metric=self._number, verb=verb, amount=float(amount)))

    def __del__(self) -> None:
        self._change("drop", 0.0)


class MetricFamily:
    """A name under which series with different labels are shown."""

    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, name: str, description: str, kind: int) -> None:
        """Name a family.

        Raises:
            TritonModelException: it is to be a histogram.
        """
        if kind not in (self.COUNTER, self.GAUGE):
            raise TritonModelException(
                f"metric family '{name}' is of kind {kind}, but only COUNTER and GAUGE are "
                "served. Count sums and numbers of values instead."
            )
        self.wire = {
            "name": name,
            "description": description,
            "kind": COUNTER if kind == self.COUNTER else GAUGE,
        }

    def Metric(self, labels: Mapping[str, str] | None = None) -> Metric:
        """A series of this family."""
        return Metric(self, labels or {})
