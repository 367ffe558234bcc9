"""The example of docs/changing-the-scheduler.md decides as the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.worker.scheduling.test_scheduler import Planner

ROOT = Path(__file__).resolve().parents[4]
POLICY = "admission_policy.ShortestPromptFirst"


@pytest.fixture(autouse=True)
def example_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def _prefills(planner):
    running = planner.scheduler.running
    return sum(s.num_computed_tokens < s.num_prompt_tokens for s in running)


def test_the_example_starts_short_prompts_first_and_two_prompts_at_a_time():
    # 4 tokens a step: prompts of several steps, so that prefills overlap.
    planner = Planner(policy=POLICY, max_num_batched_tokens=4, max_num_seqs=4)
    for length in (40, 9, 24, 12, 30):
        planner.add(length, max_tokens=1)
    order, most = [], 0
    while planner.scheduler.has_requests:
        planner.step()
        most = max(most, _prefills(planner))
        order += [number for number in planner.ended if number not in order]

    assert order == [1, 3, 2, 4, 0]
    assert 1 <= most <= 2
    planner.check_empty()


def test_an_engine_serves_the_same_tokens_with_the_example(make_engine, prompt_of):
    outputs = []
    for policy in ("guaranteed_no_evict", POLICY):
        driver = make_engine(policy=policy)
        prompts = [prompt_of(length, length) for length in (30, 9, 17, 4)]
        outputs.append(driver.serve(prompts))
        driver.check_idle()

    assert outputs[0] == outputs[1]
