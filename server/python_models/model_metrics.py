"""The metrics of ``triton_python_backend_utils``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from trimaran.server.python_models import wire
from trimaran.server.python_models.inference_request import ask
from trimaran.server.python_models.link import the_link
from trimaran.server.python_models.tensors import TritonModelException

_numbers = itertools.count(1)
_KINDS = (wire.COUNTER, wire.GAUGE, wire.HISTOGRAM)


class Metric:
    """One series, which ends with the last object that stands for it in any process."""

    def __init__(
        self, family: MetricFamily, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> None:
        """Show the series.

        Raises:
            TritonModelException: the family's name is taken, or has other buckets.
        """
        self._number = next(_numbers)
        self._kind = family.kind
        described = {
            "name": family.name,
            "description": family.description,
            "kind": family.kind,
            "bounds": [float(bound) for bound in buckets],
        }
        ask("metric_hold", metric=self._number, family=described, labels=dict(labels))

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge.

        Raises:
            TritonModelException: a counter would fall.
        """
        self._expect("incremented", wire.COUNTER, wire.GAUGE)
        if self._kind == wire.COUNTER and value < 0:
            raise TritonModelException(f"a counter cannot be incremented by {value}, below 0")
        self._change("add", value)

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._expect("set", wire.GAUGE)
        self._change("set", value)

    def observe(self, value: float) -> None:
        """Add a value to a histogram."""
        self._expect("given values to observe", wire.HISTOGRAM)
        self._change("observe", value)

    def value(self) -> float:
        """What a counter or a gauge is now, with what other processes made of it."""
        self._expect("asked for one value", wire.COUNTER, wire.GAUGE)
        return float(ask("metric_value", metric=self._number)["value"])

    def _expect(self, what: str, *kinds: str) -> None:
        if self._kind not in kinds:
            raise TritonModelException(
                f"a {self._kind} cannot be {what}; a {' or a '.join(kinds)} can"
            )

    def _change(self, verb: str, amount: float) -> None:
        change = wire.MetricChange(metric=self._number, verb=verb, amount=float(amount))
        the_link().send(change)

    def __del__(self) -> None:
        self._change("drop", 0.0)


class MetricFamily:
    """A name under which series with different labels are shown."""

    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, name: str, description: str, kind: int) -> None:
        """Name a family.

        Raises:
            TritonModelException: ``kind`` is none of the constants of this class.
        """
        if kind not in range(len(_KINDS)):
            raise TritonModelException(
                f"metric family '{name}' is of kind {kind}, which is none of COUNTER, GAUGE "
                "and HISTOGRAM"
            )
        self.name = name
        self.description = description
        self.kind = _KINDS[kind]

    def Metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] = ()
    ) -> Metric:
        """A series of this family; ``buckets`` are a histogram's, by their upper ends.

        Raises:
            TritonModelException: buckets of what is no histogram, or of one that has others.
        """
        if bool(buckets) != (self.kind == wire.HISTOGRAM):
            raise TritonModelException(
                f"a metric of the {self.kind} '{self.name}' is given the buckets "
                f"{list(buckets)}; a histogram has some, others have none"
            )
        return Metric(self, labels or {}, buckets)
