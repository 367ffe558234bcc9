"""How long planning can wait for new requests."""

import pytest

from trimaran.worker.engine.plan_timing import PlanTiming


def after_steps(
    step_s: float, plan_s: float, *, count: int = 20, num_prompt_tokens: int = 0
) -> tuple[PlanTiming, float]:
    """A device that has run steps of ``step_s``, two in flight; and the current time."""
    timing = PlanTiming(is_overlapped=True)
    now = 100.0
    timing.submitted(now)
    timing.planned(now, now + plan_s, num_prompt_tokens)
    for _ in range(count):
        timing.planned(now, now + plan_s, num_prompt_tokens)
        now += step_s
        timing.arrived(now, has_waited=True)
    return timing, now


def test_planning_waits_for_most_of_the_step_in_flight_and_leaves_time_to_launch():
    timing, now = after_steps(0.010, 0.001)
    # 1.25 ms for planning and a margin of 0.4 ms.
    assert timing.spare_s(now) == pytest.approx(0.00835)
    assert timing.spare_s(now + 0.0072) == pytest.approx(0.00115)
    assert timing.spare_s(now + 0.0083) == 0


def test_planning_does_not_wait_when_waiting_would_idle_the_device():
    timing, now = after_steps(0.0016, 0.001)
    assert timing.spare_s(now) == 0
    timing, now = after_steps(0.010, 0.001)
    timing.arrived(now + 0.010, has_waited=True)
    assert timing.spare_s(now + 0.010) == 0


def test_without_overlap_a_step_is_planned_at_once():
    timing = PlanTiming(is_overlapped=False)
    for now in (1.0, 1.01, 1.02):
        timing.submitted(now)
        timing.planned(now, now, 0)
        timing.arrived(now + 0.01, has_waited=True)
    timing.planned(1.03, 1.03, 0)
    assert timing.spare_s(1.03) == 0


def test_planning_does_not_wait_without_recent_arrivals():
    timing, now = after_steps(0.010, 0.001, count=300)
    assert timing.spare_s(now) == 0
    timing.submitted(now)
    assert timing.spare_s(now) > 0


def test_the_step_time_estimate_drops_at_once_and_rises_slowly():
    timing, now = after_steps(0.010, 0.001)
    timing.planned(now, now + 0.001, 0)
    timing.arrived(now + 0.005, has_waited=True)
    assert timing.spare_s(now + 0.005) == pytest.approx(0.00335)
    timing, now = after_steps(0.010, 0.001)
    timing.planned(now, now + 0.001, 0)
    timing.arrived(now + 0.030, has_waited=True)
    assert timing.spare_s(now + 0.030) <= 0.011


def test_the_time_of_a_step_with_prompts_is_estimated_by_its_tokens():
    timing, now = after_steps(0.010, 0.001)
    timing.planned(now, now + 0.001, 500)
    timing.arrived(now + 0.010, has_waited=True)
    # The duration of this step is unknown yet: the estimate is that of a decode.
    assert timing.spare_s(now + 0.010) == pytest.approx(0.00835)
    timing.planned(now, now + 0.001, 250)
    timing.arrived(now + 0.025, has_waited=True)
    # 500 tokens took 5 ms more than a decode.
    assert timing.spare_s(now + 0.025) == pytest.approx(0.00835 + 0.0025)
    timing.planned(now, now + 0.001, 0)
    timing.arrived(now + 0.050, has_waited=False)
    assert timing.spare_s(now + 0.050) == pytest.approx(0.00835)


def test_steps_with_short_prompts_and_late_observations_change_no_estimate():
    timing, now = after_steps(0.010, 0.001)
    timing.planned(now, now + 0.001, 20)
    timing.arrived(now + 0.1, has_waited=False)
    timing.planned(now, now + 0.001, 0)
    timing.arrived(now + 0.2, has_waited=True)
    assert timing.spare_s(now + 0.2) == pytest.approx(0.00835)
