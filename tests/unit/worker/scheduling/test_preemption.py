"""Sequences that were preempted for lack of blocks resume."""

from __future__ import annotations

from tests.unit.worker.scheduling.test_scheduler import BLOCK, Planner

LIMITS = {
    "num_blocks": 400, "enable_reuse": False, "max_num_batched_tokens": 4096,
    "max_seq_len": 2048, "max_input_len": 2047,
}  # fmt: skip


def test_a_preempted_sequence_resumes_in_chunks_beside_others():
    planner = Planner(**LIMITS)
    for num_prompt, count in ((480, 300), (478, 60), (560, 150)):
        planner.add(num_prompt, max_tokens=count)
    parts = []
    while planner.scheduler.has_requests:
        was_paused = planner.scheduler.preemptions.num_waiting or parts
        scheduled = planner.step()
        if was_paused and scheduled.get(2, 0) > 1:
            parts.append(scheduled[2])

    assert len(parts) == 2
    assert max(parts) <= 512
    assert 560 < sum(parts) < 600
    assert len(planner.ended) == 3


def test_a_preempted_sequence_resumes_in_one_step_without_chunked_prefill():
    planner = Planner(**LIMITS, enable_chunked_context=False)
    for num_prompt, count in ((480, 300), (478, 60), (560, 150)):
        planner.add(num_prompt, max_tokens=count)
    counts = []
    while planner.scheduler.has_requests:
        counts.append(planner.step().get(2, 0))

    assert sorted(counts)[-2] >= 560
    assert sorted(counts)[-3] == 1


def test_the_first_preempted_sequence_resumes_first_and_is_not_preempted_next():
    planner = Planner(num_blocks=24, enable_reuse=False, max_num_seqs=6)
    for _ in range(6):
        planner.add(2 * BLOCK, max_tokens=3 * BLOCK)
    paused, back = [], []
    while planner.scheduler.has_requests:
        before = {s.request.number for s in planner.scheduler.waiting if s.is_preempted}
        planner.step()
        after = {s.request.number for s in planner.scheduler.waiting if s.is_preempted}
        paused += sorted(after - before, reverse=True)
        back += [number for number in paused if number in before - after]

    assert len(paused) == len(set(paused)) > 1
    assert back == paused
    pauses = planner.scheduler.preemptions
    assert (pauses.num_waiting, pauses.num_sequences) == (0, len(paused))
    assert 2 * BLOCK * len(paused) <= pauses.num_tokens < 5 * BLOCK * len(paused)
