"""Counters and histograms of the event loop, beside those of prometheus_client."""

from __future__ import annotations

import random

import pytest
from prometheus_client import Counter, Histogram
from prometheus_client.registry import CollectorRegistry

from trimaran.server.metrics.exposition import render
from trimaran.server.metrics.loop_metrics import LoopCounter, LoopHistogram

LABELS = ("model", "version")


def _rendered(registry: CollectorRegistry) -> list[str]:
    return render(registry.collect(), {}).decode().splitlines()


@pytest.mark.parametrize("buckets", [(0.001, 0.01, 1.0), (1, 10, 1e6, float("inf")), (5.0,)])
def test_a_histogram_shows_what_prometheus_histogram_shows(buckets):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    loop = LoopHistogram("h_seconds", "Help", LABELS, buckets, ours)
    known = Histogram("h_seconds", "Help", LABELS, buckets=buckets, registry=theirs)
    draw = random.Random(3)
    values = [0.0, *buckets[:2], *(draw.expovariate(1.0) for _ in range(100)), 1e9]
    for value in values:
        loop.labels("m", "1").observe(value)
        known.labels("m", "1").observe(value)
    loop.labels("other", "1")
    known.labels("other", "1")
    assert _rendered(ours) == _rendered(theirs)


def test_equal_observations_are_added_in_one_call():
    once, each = CollectorRegistry(), CollectorRegistry()
    LoopHistogram("h", "Help", LABELS, (1, 2), once).labels("m", "1").observe(1.5, 3)
    series = LoopHistogram("h", "Help", LABELS, (1, 2), each).labels("m", "1")
    for _ in range(3):
        series.observe(1.5)
    assert _rendered(once) == _rendered(each)


def test_a_counter_shows_what_prometheus_counter_shows():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    families = (
        LoopCounter("nv_inference_count", "Help", LABELS, ours),
        Counter("nv_inference_count", "Help", LABELS, registry=theirs),
    )
    for family in families:
        family.labels("m", "1").inc()
        family.labels("m", "1").inc(2.5)
        family.labels("m", "2")
    assert _rendered(ours) == _rendered(theirs)
    assert 'nv_inference_count{model="m",version="1"} 3.5' in _rendered(ours)


def test_a_series_that_was_removed_begins_at_0():
    registry = CollectorRegistry()
    counter = LoopCounter("c", "Help", LABELS, registry)
    histogram = LoopHistogram("h", "Help", LABELS, (1,), registry)
    counter.labels("m", "1").inc(7)
    histogram.labels("m", "1").observe(0.5)
    for family in (counter, histogram):
        family.remove("m", "1")
        family.remove("unknown", "1")
    assert _rendered(registry) == [""]
    counter.labels("m", "1")
    histogram.labels("m", "1")
    assert 'c{model="m",version="1"} 0' in _rendered(registry)
    assert 'h_count{model="m",version="1"} 0' in _rendered(registry)
