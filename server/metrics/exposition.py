"""Prometheus text exposition, and summaries, which `prometheus_client` lacks."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import CollectorRegistry

_TAGGED = ("nv_inference_", "nv_model_load_")
"""Families whose series carry the tags of their models."""

_BOUNDS = ("le", "quantile")
"""Labels that stand behind the others, which are sorted, as Triton prints them."""

Tags = Mapping[tuple[str, str], Mapping[str, str]]


def render(metrics: Iterable[Metric], tags: Tags) -> bytes:
    """Metrics as text 0.0.4; a family without samples is omitted. ``tags`` are additional
    labels of models, by name and version.

    Unlike `prometheus_client`, this renderer keeps counter names unchanged and writes bucket
    bounds like values: clients look for ``nv_inference_count``, not
    ``nv_inference_count_total``, and for ``le="100"``, not ``le="100.0"``.
    """
    lines: list[str] = []
    for metric in metrics:
        if not metric.samples:
            continue
        is_counter = metric.type == "counter"
        is_tagged = metric.name.startswith(_TAGGED)
        lines.append(f"# HELP {metric.name} {_escaped(metric.documentation, quotes=False)}")
        lines.append(f"# TYPE {metric.name} {metric.type}")
        for sample in metric.samples:
            name = sample.name
            if name.endswith("_created"):
                continue
            if is_counter:
                name = name.removesuffix("_total")
            labels = sample.labels
            if is_tagged:
                labels = {**labels, **tags.get((labels["model"], labels["version"]), {})}
            if "le" in labels and metric.type == "histogram":
                labels = {**labels, "le": _number(float(labels["le"]))}
            lines.append(f"{name}{_labels(labels)} {_number(sample.value)}")
    # A label may hold a client's text, which need not be UTF-8; the page must be.
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    pairs = sorted(labels.items(), key=lambda pair: (pair[0] in _BOUNDS, pair[0]))
    return "{" + ",".join(f'{k}="{_escaped(v)}"' for k, v in pairs) + "}"


def _escaped(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    if math.isnan(value):
        return "Nan"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1 << 53 else repr(value)


class QuantileSummary:
    """Quantiles of the values observed during the last minute; NaN without values."""

    WINDOW_S = 60.0
    MAX_SAMPLES = 4096

    def __init__(
        self,
        name: str,
        documentation: str,
        quantiles: Iterable[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._quantiles = tuple(quantiles)
        self._series: dict[tuple[str, str], _Window] = {}
        registry.register(self)

    def add_series(self, model: str, version: str) -> None:
        """Show this model from now on."""
        self._series[model, version] = _Window(self.MAX_SAMPLES)

    def remove_series(self, model: str, version: str) -> None:
        """Remove this model."""
        self._series.pop((model, version), None)

    def observe(self, model: str, version: str, value: float) -> None:
        """Add one value of a shown model."""
        window = self._series.get((model, version))
        if window is not None:
            window.add(value)

    def collect(self) -> Iterator[Metric]:
        """`prometheus_client` collects samples here."""
        metric = Metric(self._name, self._documentation, "summary")
        for (model, version), window in self._series.items():
            labels = {"model": model, "version": version}
            values = window.recent(self.WINDOW_S)
            metric.add_sample(f"{self._name}_count", labels, float(window.count))
            metric.add_sample(f"{self._name}_sum", labels, window.total)
            for quantile in self._quantiles:
                index = min(len(values) - 1, int(quantile * len(values)))
                value = values[index] if values else math.nan
                metric.add_sample(self._name, {**labels, "quantile": f"{quantile:g}"}, value)
        yield metric


class _Window:
    """The latest values with their times, and the sum and count of all values."""

    def __init__(self, max_samples: int) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=max_samples)
        self.count = 0
        self.total = 0.0

    def add(self, value: float) -> None:
        """Add one value, now."""
        self._samples.append((time.monotonic(), value))
        self.count += 1
        self.total += value

    def recent(self, window_s: float) -> list[float]:
        """The values of the last ``window_s`` seconds, sorted."""
        oldest = time.monotonic() - window_s
        while self._samples and self._samples[0][0] < oldest:
            self._samples.popleft()
        return sorted(value for _, value in self._samples)
