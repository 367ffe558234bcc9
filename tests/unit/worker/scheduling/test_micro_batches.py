"""Steps of a pipeline hold disjoint sequences, in even shares, and carry the ids."""

from __future__ import annotations

import itertools
import random
from collections import deque

from tests.unit.worker.scheduling.test_scheduler import Planner
from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.scheduling.scheduler import Scheduler


def staged(count, **limits):
    """A planner whose steps are those of ``count`` stages."""
    planner = Planner(num_blocks=limits.pop("num_blocks", 400), **limits)
    planner.scheduler = Scheduler(planner.config, planner.cache, None, count)
    return planner


def steady_sizes(planner, count, num_steps):
    """Sequences of each of the last steps, with ``count`` in flight."""
    in_flight, sizes = deque(), []
    for _ in range(num_steps):
        step = planner.plan()
        if step is not None:
            in_flight.append(step)
            sizes.append(len(step.decision.rows))
        if step is None or len(in_flight) == count:
            planner.answer(in_flight.popleft())
    return sizes[-2 * count :]


def test_steps_in_flight_take_even_shares_of_the_sequences():
    planner = staged(3, max_num_seqs=16, max_num_batched_tokens=64)
    for _ in range(11):
        planner.add(4, max_tokens=100)

    sizes = steady_sizes(planner, 3, 40)

    assert sum(sizes) == 2 * 11
    assert max(sizes) - min(sizes) <= 1


def test_no_sequence_starves_with_fewer_steps_in_flight_than_sequences():
    planner = staged(4, max_num_seqs=16, max_num_batched_tokens=64)
    requests = [planner.add(4, max_tokens=200) for _ in range(6)]

    steady_sizes(planner, 4, 120)

    outputs = [request.sequences[0].num_output_tokens for request in requests]
    assert max(outputs) - min(outputs) <= 2


def test_chunks_of_a_prompt_run_in_consecutive_steps_beside_a_share_of_the_decodes():
    planner = staged(2, max_num_batched_tokens=12)
    for _ in range(4):
        planner.add(2, max_tokens=50)
    steady_sizes(planner, 2, 10)
    long = planner.add(60, max_tokens=2)
    in_flight = deque()

    computed = []
    while not computed or computed[-1] < 60:
        step = planner.plan()
        in_flight.append(step)
        if len(in_flight) == 2:
            planner.answer(in_flight.popleft())
        computed.append(long.sequences[0].num_computed_tokens)

    # Not in every second step: each has a chunk.
    assert all(before < after for before, after in itertools.pairwise(computed))


def test_decisions_of_pipeline_stages_carry_the_input_ids_of_decodes():
    planner = staged(2)
    request = planner.add(5, max_tokens=5)
    planner.answer(planner.plan(), 77)

    step = planner.plan()

    assert step.decision.decode_ids.tolist() == [77]
    assert step.decision.num_computed_tokens.tolist() == [5]
    assert planner.plan() is None
    planner.answer(step, 78)
    assert planner.plan().decision.decode_ids.tolist() == [78]
    assert request.sequences[0].num_pending == 1


def test_random_histories_end_with_every_request_served():
    for seed in range(12):
        rng = random.Random(seed)
        count = rng.choice((2, 3))
        planner = staged(
            count,
            num_blocks=rng.randrange(16, 40),
            max_num_batched_tokens=rng.choice((9, 16, 40)),
            max_num_seqs=rng.randrange(2, 9),
        )
        run_history(planner, rng, count)


def run_history(planner, rng, count):
    in_flight, to_come = deque(), 25
    for _ in range(3000):
        if to_come and rng.random() < 0.4:
            to_come -= 1
            length = rng.randrange(1, 30)
            planner.add(length, max_tokens=rng.randrange(1, 20), priority=rng.choice((0, 1)))
        if planner.requests and rng.random() < 0.03:
            planner.scheduler.end(rng.choice(planner.requests), FinishReason.CANCELLED)
        step = planner.plan()
        if step is not None:
            rows = set(step.decision.rows.tolist())
            sampled = [row for other in in_flight for row in sampled_rows(other)]
            assert rows.isdisjoint(sampled)
            in_flight.append(step)
        if in_flight and (step is None or len(in_flight) == count):
            planner.answer(in_flight.popleft(), rng.randrange(4))
        planner.scheduler.take_ended()
        if not (to_come or in_flight or planner.scheduler.has_requests):
            break
    assert all(request.is_finished for request in planner.requests)
    planner.check_empty()


def sampled_rows(step):
    """Rows of a step in flight whose sequences still run there."""
    rows = step.decision.rows[step.decision.sampled].tolist()
    pairs = zip(rows, step.sampled, strict=True)
    return [row for row, sequence in pairs if sequence.row == row and sequence.num_pending]


def test_a_step_whose_sequences_are_all_preempted_runs_other_sequences():
    planner = staged(2, policy="static_batch")
    # Above this number of tokens a sequence is recomputed, in a batch of its own.
    planner.cache.switch_at = 4
    planner.add(4)
    planner.add(2)
    planner.answer(planner.plan())

    step = planner.plan()

    assert [sequence.request.number for sequence in step.sampled] == [1]
    planner.answer(step)
    while planner.scheduler.has_requests:
        assert planner.step()
    planner.check_empty()
