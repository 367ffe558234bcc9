"""The soak's judgement: the ends of a request that the promise allows and forbids."""

from __future__ import annotations

import pytest
from chaos import Disturbance
from load import Outcome
from soak_run import judge

KILL = Disturbance("kill a rank", ("a",), [1], start_s=10.0, end_s=20.0)
FRONT_END = Disturbance("kill the front end", ("a", "b"), [2], start_s=30.0, end_s=40.0)


def ended(kind: str, start_s: float, model: str = "a") -> Outcome:
    return Outcome(model, "http", start_s, start_s + 2.0, kind, "text")


@pytest.mark.parametrize(
    "outcome",
    [
        ended("right", 0.0),
        ended("right", 15.0),
        ended("cancelled", 15.0),
        ended("retryable", 9.0),
        ended("retryable", 15.0),
        ended("retryable", 20.5),
        ended("connection lost", 31.0, "b"),
    ],
)
def test_the_judge_accepts_right_answers_and_refusals_during_faults(outcome):
    assert judge([outcome], [KILL, FRONT_END]) == []


@pytest.mark.parametrize(
    "outcome",
    [
        ended("retryable", 0.0),
        ended("retryable", 15.0, "b"),
        ended("retryable", 25.0),
        ended("connection lost", 15.0),
        ended("wrong", 15.0),
        ended("late", 15.0),
        ended("failed", 15.0),
        ended("failed", 31.0),
    ],
)
def test_the_judge_finds_wrong_tokens_and_failures_of_unaffected_requests(outcome):
    (problem,) = judge([outcome], [KILL, FRONT_END])
    assert problem.startswith("1 x ")
