"""Histograms that requests fill, beside those of Prometheus's own client."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Histogram

from trimaran.server.metrics.exposition import render
from trimaran.server.metrics.histograms import HistogramFamily

BOUNDS = (0.001, 0.05, 1, 2.5)


def test_a_histogram_is_shown_as_by_the_prometheus_client():
    """At bounds, beyond the last bound, and without values."""
    rng = random.Random(7)
    values = [*BOUNDS, 0.0, 99.0, *(rng.uniform(0, 4) for _ in range(200))]
    registry, theirs = CollectorRegistry(), CollectorRegistry()
    family = HistogramFamily("waits", "Waits, in s", ("model", "version"), registry)
    other = Histogram("waits", "Waits, in s", ("model", "version"), buckets=BOUNDS,
                      registry=theirs)  # fmt: skip
    family.series(("n", "1"), BOUNDS)
    other.labels("n", "1")
    for value in values:
        family.series(("m", "1"), BOUNDS).observe(value)
        other.labels("m", "1").observe(value)

    assert render(registry.collect(), {}) == render(theirs.collect(), {})


def test_equal_values_are_added_at_once():
    registry = CollectorRegistry()
    series = HistogramFamily("waits", "", ("model",), registry).series(("m",), BOUNDS)

    series.observe(0.5, 3)

    assert dict(series.buckets()) == {"0.001": 0, "0.05": 0, "1.0": 3, "2.5": 3, "+Inf": 3}
    assert series.sum == pytest.approx(1.5)


def test_series_of_one_name_have_buckets_of_their_own_and_begin_at_0_after_a_removal():
    registry = CollectorRegistry()
    family = HistogramFamily("waits", "", ("model",), registry)
    family.series(("m",), (1.0,)).observe(0.5)
    family.series(("n",), (1.0, 2.0)).observe(1.5)
    family.remove("m")
    family.series(("m",), (3.0,))

    text = render(registry.collect(), {}).decode()

    assert 'waits_bucket{model="n",le="2"} 1' in text
    assert 'waits_bucket{model="m",le="3"} 0' in text
    assert 'waits_bucket{model="m",le="1"}' not in text
