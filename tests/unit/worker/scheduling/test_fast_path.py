"""The scheduler's fast path for decodes decides what the general path decides."""

from __future__ import annotations

import random
from collections import deque

import pytest

from tests.unit.worker.scheduling.test_scheduler import Planner
from trimaran.worker.scheduling.step_plan import StepPlan

# Without `capacity`, which the test itself changes.
STATE = (
    "row", "num_computed_tokens", "num_computed_before", "num_pending", "last_step",
    "publish_at", "status", "is_preempted", "key",
)  # fmt: skip


def run(monkeypatch, seed, *, is_fast, **limits):
    """Decisions and states of a random history, and the number of decodes by the fast path."""
    rng = random.Random(seed)
    planner = Planner(
        num_blocks=rng.choice([14, 24, 64]), host_slots=rng.choice([0, 20]),
        max_seq_len=60, max_input_len=50, max_num_batched_tokens=rng.choice([8, 32]), **limits,
    )  # fmt: skip
    scheduler, num_added = planner.scheduler, 0
    add = StepPlan.add

    def count(self, *arguments):
        nonlocal num_added
        num_added += 1
        add(self, *arguments)

    monkeypatch.setattr(StepPlan, "add", count)
    depth, in_flight = rng.choice([1, 2]), deque()
    history, num_entries = [], 0
    for number in range(200):
        if number < 150 and rng.random() < 0.3:
            planner.add(
                rng.randrange(1, 24), max_tokens=rng.randrange(1, 30),
                num_return_sequences=rng.choice([1, 1, 2]), priority=rng.choice([0, 0, 1]),
            )  # fmt: skip
        scheduler.swap_ins.done_step = scheduler.step - rng.randrange(2)
        if not is_fast:
            # Without room for its next token a sequence takes the general path, which then
            # finds that its blocks have room.
            for sequence in scheduler.running:
                sequence.capacity = 0
        step = planner.plan()
        if step is not None:
            in_flight.append(step)
            history.append(step.decision.encode())
            num_entries += len(step.decision.rows)
        sequences = (s for request in planner.requests for s in request.sequences)
        history.append([[getattr(s, name) for name in STATE] for s in sequences])
        if in_flight and (step is None or len(in_flight) == depth):
            planner.answer(in_flight.popleft(), rng.randrange(1, 9))
    monkeypatch.undo()
    return history, num_entries - num_added


@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict", "static_batch"])
@pytest.mark.parametrize("seed", range(4))
def test_the_fast_path_of_decodes_decides_what_the_general_path_decides(
    monkeypatch, policy, seed
):
    fast, num_fast = run(monkeypatch, seed, is_fast=True, policy=policy)
    general, num_none = run(monkeypatch, seed, is_fast=False, policy=policy)

    assert num_fast > 50 and num_none == 0
    assert fast == general
