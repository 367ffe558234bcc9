"""The last minute of the latency histograms."""

import pytest
from prometheus_client import CollectorRegistry, Histogram

from trimaran.server.metrics.recent_rates import Counts, ModelCounts, RecentRates, read_counts

KEY = ("llama", "1")


@pytest.fixture
def histograms():
    registry = CollectorRegistry()
    return tuple(
        Histogram(name, name, ("model", "version"), buckets=(0.1, 0.2, 0.4), registry=registry)
        for name in ("first", "inter")
    )


def observe(histogram, *values, key=KEY):
    for value in values:
        histogram.labels(*key).observe(value)


def test_tokens_per_second_count_first_and_later_tokens(histograms):
    first, inter = histograms
    recent = RecentRates()
    recent.add(read_counts(first.collect(), inter.collect()), now=100.0)
    observe(first, 0.1)
    observe(inter, *[0.01] * 19)
    recent.add(read_counts(first.collect(), inter.collect()), now=104.0)
    assert recent.rates(KEY).tokens_per_s == 5.0


def test_the_rate_covers_the_last_ten_seconds(histograms):
    first, inter = histograms
    recent = RecentRates()
    recent.add(read_counts(first.collect(), inter.collect()), now=0.0)
    observe(inter, *[0.01] * 1000)
    for second in range(2, 30, 2):
        recent.add(read_counts(first.collect(), inter.collect()), now=float(second))
    assert recent.rates(KEY).tokens_per_s == 0.0
    assert recent.rates(KEY).inter_token_p50_s is not None


def test_quantiles_cover_the_last_minute(histograms):
    first, inter = histograms
    recent = RecentRates()
    recent.add(read_counts(first.collect(), inter.collect()), now=0.0)
    observe(first, 0.35)
    recent.add(read_counts(first.collect(), inter.collect()), now=2.0)
    assert 0.2 < recent.rates(KEY).first_token_p99_s <= 0.4
    for second in range(4, 70, 2):
        recent.add(read_counts(first.collect(), inter.collect()), now=float(second))
    assert recent.rates(KEY).first_token_p99_s is None


def test_memory_is_bounded_by_the_window(histograms):
    recent = RecentRates()
    for second in range(0, 10_000, 2):
        recent.add(read_counts(*(each.collect() for each in histograms)), now=float(second))
    assert len(recent._snapshots) <= 32


def test_quantiles_are_linear_inside_a_bucket():
    counts = Counts((0.1, 0.2, 0.4, float("inf")), (10.0, 20.0, 20.0, 20.0))
    assert counts.quantile(0.5) == pytest.approx(0.1)
    assert counts.quantile(0.75) == pytest.approx(0.15)
    assert Counts((0.1, float("inf")), (0.0, 5.0)).quantile(0.5) == 0.1
    assert Counts().quantile(0.5) is None


def test_a_reloaded_model_starts_again_from_nothing():
    before = ModelCounts(inter_token=Counts((0.1, float("inf")), (50.0, 50.0)))
    after = ModelCounts(inter_token=Counts((0.1, float("inf")), (4.0, 4.0)))
    recent = RecentRates()
    recent.add({KEY: before}, now=0.0)
    recent.add({KEY: after}, now=4.0)
    assert recent.rates(KEY).tokens_per_s == 0.0
    assert recent.rates(KEY).inter_token_p50_s == pytest.approx(0.05)


def test_an_unknown_model_has_no_figures(histograms):
    recent = RecentRates()
    assert recent.rates(KEY).tokens_per_s == 0.0
    recent.add(read_counts(*(each.collect() for each in histograms)), now=1.0)
    assert recent.rates(KEY).first_token_p50_s is None
