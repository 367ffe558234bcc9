"""How long a plan can wait for newcomers."""

import pytest

from trimaran.worker.plan_timing import PlanTiming


def after_decodes(step_s: float, plan_s: float, *, count: int = 20) -> tuple[PlanTiming, float]:
    """A device that has run decodes of ``step_s``, two in flight; and the time now."""
    timing = PlanTiming(is_overlapped=True)
    now = 100.0
    timing.submitted(now)
    for _ in range(count):
        timing.planned(now, now + plan_s)
        now += step_s
        timing.arrived(now, is_decode=True, has_waited=True, is_last=False)
    return timing, now


def test_a_plan_waits_for_most_of_a_step_and_leaves_time_to_launch():
    timing, now = after_decodes(0.010, 0.001)
    assert timing.spare_s(now) == pytest.approx(0.008)
    # 1.25 ms for planning and 0.4 ms besides.
    assert timing.spare_s(now + 0.0072) == pytest.approx(0.001)
    assert timing.spare_s(now + 0.0080) == 0


def test_nothing_is_waited_for_where_that_would_leave_a_gap():
    timing, now = after_decodes(0.002, 0.001)
    assert timing.spare_s(now) == 0
    timing, now = after_decodes(0.010, 0.001)
    timing.arrived(now, is_decode=True, has_waited=True, is_last=True)
    assert timing.spare_s(now) == 0


def test_one_step_in_flight_is_planned_at_once():
    timing = PlanTiming(is_overlapped=False)
    for now in (1.0, 1.01, 1.02):
        timing.submitted(now)
        timing.arrived(now, is_decode=True, has_waited=True, is_last=False)
    assert timing.spare_s(1.02) == 0


def test_without_requests_lately_none_is_waited_for():
    timing, now = after_decodes(0.010, 0.001, count=300)
    assert timing.spare_s(now) == 0
    timing.submitted(now)
    assert timing.spare_s(now) > 0


def test_a_shorter_step_is_believed_at_once_and_a_longer_one_slowly():
    timing, now = after_decodes(0.010, 0.001)
    timing.arrived(now + 0.005, is_decode=True, has_waited=True, is_last=False)
    assert timing.spare_s(now + 0.005) == pytest.approx(0.003)
    timing, now = after_decodes(0.010, 0.001)
    timing.arrived(now + 0.030, is_decode=True, has_waited=True, is_last=False)
    assert timing.spare_s(now + 0.030) <= 0.011


def test_steps_with_prompts_teach_nothing():
    timing, now = after_decodes(0.010, 0.001)
    timing.arrived(now + 0.1, is_decode=False, has_waited=True, is_last=False)
    timing.arrived(now + 0.2, is_decode=True, has_waited=False, is_last=False)
    assert timing.spare_s(now + 0.2) == pytest.approx(0.008)
