"""A waiting sequence is admitted as soon as blocks suffice, without a look-up in each step."""

from __future__ import annotations

import random

import pytest

from tests.unit.worker.scheduling.test_scheduler import BLOCK, Planner
from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.scheduling import capacity
from trimaran.worker.scheduling.capacity import CapacityCheck


def test_the_prefix_of_a_waiting_prompt_is_looked_up_again_only_when_blocks_may_suffice(
    monkeypatch,
):
    find_prefix, num_looks = capacity.find_prefix, 0

    def count(*arguments, **options):
        nonlocal num_looks
        num_looks += 1
        return find_prefix(*arguments, **options)

    monkeypatch.setattr(capacity, "find_prefix", count)
    planner = Planner(num_blocks=80, policy="guaranteed_no_evict", max_num_batched_tokens=256)
    prompt = list(range(32 * BLOCK))
    for number in range(2):
        planner.add(prompt=[*prompt, number], max_tokens=80)
    planner.step()
    waiting = planner.add(prompt=[999, *prompt], max_tokens=8)
    num_looks = 0

    while not planner.ended:
        planner.step()
        assert not planner.ended or not waiting.sequences[0].num_computed_tokens
    num_steps = planner.scheduler.step
    planner.step()

    assert num_steps == 80 and waiting.sequences[0].num_computed_tokens
    assert num_looks <= 4
    while planner.scheduler.has_requests:
        planner.step()
    planner.check_empty()


@pytest.mark.matrix(keep=3)
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("seed", range(4))
def test_skipped_prefix_lookups_delay_no_sequence(monkeypatch, policy, seed):
    rng = random.Random(seed)
    find, answers = CapacityCheck.find, []

    def compare(self, sequence, step, **options):
        anew = find(CapacityCheck(self._config, self._cache), sequence, step, **options)
        answers.append((find(self, sequence, step, **options), anew))
        return answers[-1][0]

    monkeypatch.setattr(CapacityCheck, "find", compare)
    planner = Planner(
        num_blocks=rng.choice([12, 18, 24]),
        policy=policy,
        host_slots=rng.choice([0, 10]),
        max_num_batched_tokens=rng.choice([8, 32]),
        max_seq_len=44,
        max_input_len=40,
    )
    prefixes = [[number] * rng.choice([4, 9, 20]) for number in range(3)]
    for _ in range(250):
        if rng.random() < 0.6:
            prompt = rng.choice(prefixes) + [rng.randrange(4) for _ in range(rng.randrange(12))]
            count = rng.choice([1, 1, 2])
            planner.add(
                prompt=prompt, max_tokens=rng.randrange(1, 12), num_return_sequences=count,
                return_context_logits=rng.random() < 0.1, priority=rng.choice([0, 0, 0, 1]),
            )  # fmt: skip
        if planner.requests and rng.random() < 0.05:
            planner.scheduler.end(rng.choice(planner.requests[-20:]), FinishReason.CANCELLED)
        planner.step(token_id=rng.randrange(4))
    while planner.scheduler.has_requests:
        planner.step()

    planner.check_empty()
    assert len(answers) > 100
    assert all(found == anew for found, anew in answers)
    if policy == "guaranteed_no_evict":
        assert sum(found is None for found, _ in answers) > 50


def test_blocks_that_another_sequence_has_started_to_use_count_as_shared():
    planner = Planner(num_blocks=12, policy="guaranteed_no_evict")
    prefix = list(range(4 * BLOCK))
    planner.add(prompt=[*prefix, 1], max_tokens=1)
    planner.step()
    planner.add(prompt=[999] * (5 * BLOCK), max_tokens=4)
    planner.step()
    waiting = planner.add(prompt=[*prefix, 2], max_tokens=4 * BLOCK)
    planner.step()
    # This sequence is more urgent, fits, and shares blocks with the waiting sequence
    # afterwards.
    planner.add(prompt=[*prefix, 3], max_tokens=4, priority=1)
    planner.step()
    assert not waiting.sequences[0].num_computed_tokens

    while 1 not in planner.ended:
        planner.step()
    planner.step()

    assert 3 not in planner.ended
    assert waiting.sequences[0].num_computed_tokens
