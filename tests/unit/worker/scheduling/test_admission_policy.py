"""A custom admission policy, named by its import path."""

from __future__ import annotations

import pytest

from tests.unit.worker.scheduling.test_scheduler import Planner
from trimaran.comm.errors import ConfigError
from trimaran.worker.scheduling.admission_policy import AdmissionPolicy


class ShortestPromptFirst(AdmissionPolicy):
    """Short prompts overtake long prompts of the same priority, and at most two sequences
    run."""

    def rank(self, sequence):
        return (sequence.num_prompt_tokens,)

    def admits(self, sequence, batch):
        return batch.num_sequences < 2


def test_a_policy_is_found_by_its_import_path_and_decides_order_and_admission():
    planner = Planner(policy=f"{__name__}.ShortestPromptFirst")
    planner.add(12, max_tokens=2)
    planner.step()
    for length in (9, 3, 6):
        planner.add(length, max_tokens=2)
    planner.add(10, max_tokens=2, priority=1)
    order = []
    while planner.scheduler.has_requests:
        planner.step()
        assert len(planner.scheduler.running) <= 2
        order += [number for number in planner.ended if number not in order]

    assert order == [0, 4, 2, 3, 1]
    planner.check_empty()


@pytest.mark.parametrize("name", ["fair", "no_such_module.Fair", f"{__name__}.Planner"])
def test_an_import_path_that_is_no_policy_is_refused(name):
    with pytest.raises(ConfigError, match=r"guaranteed_no_evict, max_utilization, static"):
        Planner(policy=name)


def test_an_engine_serves_with_a_custom_policy(make_engine, prompt_of):
    outputs = []
    for policy in ("max_utilization", f"{__name__}.ShortestPromptFirst"):
        driver = make_engine(policy=policy)
        prompts = [prompt_of(length, length) for length in (30, 9, 17, 4)]
        outputs.append(driver.serve(prompts))
        driver.check_idle()

    assert outputs[0] == outputs[1]
