"""Admission by the peak that is foretold for the KV cache."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.worker.test_scheduler import BLOCK, Planner
from trimaran.worker.growth import GrowthForecast


def finish_all(planner):
    """Steps until nothing is left; the numbers of the requests that were paused."""
    paused = set()
    while planner.scheduler.has_requests:
        planner.step()
        paused |= {s.request.number for s in planner.scheduler.waiting if s.is_preempted}
    return paused


def test_outputs_that_end_at_their_limit_are_expected_whole():
    forecast = GrowthForecast(1)
    for _ in range(2000):
        forecast.observe(100, is_at_limit=True)

    assert forecast.expected(np.array([1.0, 500.0])) == pytest.approx([1.0, 500.0], rel=0.02)


def test_outputs_that_end_early_are_expected_to():
    forecast = GrowthForecast(1024)
    rng = np.random.default_rng(0)
    for length in rng.geometric(1 / 40, 4000):
        forecast.observe(min(int(length), 100), is_at_limit=length > 100)

    assert forecast.expected(np.array([10_000.0]))[0] == pytest.approx(40, rel=0.2)


def test_no_sequence_is_paused_once_outputs_are_known_to_be_long():
    planner = Planner(num_blocks=16, enable_reuse=False)
    for _ in range(8):
        planner.add(BLOCK, max_tokens=6 * BLOCK)
    first = finish_all(planner)
    for _ in range(40):
        planner.add(BLOCK, max_tokens=6 * BLOCK)
    finish_all(planner)
    for _ in range(8):
        planner.add(BLOCK, max_tokens=6 * BLOCK)

    assert first
    assert not finish_all(planner)


def test_more_than_two_whole_lengths_run_at_once_where_outputs_end_early():
    planner = Planner(num_blocks=16, enable_reuse=False, expected_output_tokens=4)
    for _ in range(8):
        planner.add(BLOCK, max_tokens=10 * BLOCK)
    planner.step()
    planner.step()

    assert len(planner.scheduler.running) > 2


def test_a_cache_that_holds_all_at_their_limits_keeps_nobody_waiting():
    planner = Planner(num_blocks=8 * 6, enable_reuse=False, expected_output_tokens=4)
    for _ in range(8):
        planner.add(BLOCK, max_tokens=5 * BLOCK)
    planner.step()
    planner.step()

    assert len(planner.scheduler.running) == 8
    assert not finish_all(planner)
