"""Running and preempted sequences take turns, if the host cache keeps computed content."""

from __future__ import annotations

import functools

import pytest

from tests.unit.worker.scheduling.test_scheduler import BLOCK, Planner

NUM_REQUESTS, PROMPT, OUTPUT = 12, 2 * BLOCK, 120 * BLOCK
ROOM = 9 * 120


def serve(priorities=(0,) * NUM_REQUESTS, **limits):
    """Serve requests that cannot all run to their end at once. Returns the steps at which they
    ended, and the longest preemption in steps."""
    planner = Planner(
        num_blocks=limits.pop("num_blocks", ROOM),
        max_num_seqs=NUM_REQUESTS,
        max_seq_len=PROMPT + OUTPUT,
        max_input_len=PROMPT,
        **{"enable_reuse": False, **limits},
    )
    scheduler = planner.scheduler
    for priority in priorities:
        planner.add(PROMPT, max_tokens=OUTPUT, priority=priority)
    ends, longest, begun = {}, 0, {}
    while scheduler.has_requests:
        scheduler.swap_ins.done_step = scheduler.step
        planner.step()
        paused = {s.request.number for s in scheduler.waiting if s.is_preempted}
        begun = {number: begun.get(number, scheduler.step) for number in paused}
        longest = max([longest, *(scheduler.step - first for first in begun.values())])
        for number in planner.ended:
            ends.setdefault(number, scheduler.step)
    assert len(ends) == NUM_REQUESTS
    return ends, longest, scheduler


@functools.cache
def serve_without_host(enable_reuse):
    """The same without a host cache, which several tests compare with."""
    return serve(enable_reuse=enable_reuse)


@pytest.mark.parametrize("enable_reuse", [False, True])
def test_rotated_sequences_end_together_and_none_stays_preempted_for_long(enable_reuse):
    alone, longest_alone, _ = serve_without_host(enable_reuse)
    ends, longest, scheduler = serve(enable_reuse=enable_reuse, host_slots=1000)

    assert max(ends.values()) < 0.9 * max(alone.values())
    assert min(ends.values()) > 0.85 * max(ends.values())
    assert longest < longest_alone / 2
    assert scheduler.cache.hosts[0].num_loaded > 0


def test_a_host_without_room_for_preempted_sequences_allows_no_rotation():
    _, longest_alone, alone = serve_without_host(False)
    _, longest, scheduler = serve(host_slots=8)

    assert longest == longest_alone
    assert scheduler.preemptions.num_sequences == alone.preemptions.num_sequences
    assert scheduler.preemptions.num_tokens < alone.preemptions.num_tokens


def test_no_sequence_is_preempted_for_a_lower_priority():
    priorities = (1,) * 6 + (0,) * 6
    ends, _, scheduler = serve(priorities, host_slots=1000, num_blocks=8 * 120)

    first = [ends[number] for number in range(6)]
    assert max(first) < min(ends[number] for number in range(6, NUM_REQUESTS))
    assert max(first) <= OUTPUT + NUM_REQUESTS
    assert scheduler.preemptions.num_sequences > 0
