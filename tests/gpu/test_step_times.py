"""Steps' times on a GPU: adjacent steps without a gap, and gaps."""

from __future__ import annotations

import time

import pytest
import torch

from trimaran.worker.steps.step_times import DeviceClock

DEVICE = torch.device("cuda")
CYCLES = 4_000_000


def run_step(clock):
    marks = clock.begin()
    torch.cuda._sleep(CYCLES)
    marks.sampling()
    torch.cuda._sleep(CYCLES)
    marks.end()
    return marks


def seconds_of(marks):
    times = marks.seconds()
    assert times is not None
    assert min(times) > 0
    return sum(times)


def test_steps_launched_back_to_back_have_no_time_between_them():
    clock = DeviceClock(DEVICE)
    # The first launches of a process take longer than a step.
    run_step(clock)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CYCLES)  # the first step is launched before the device gets there, too
    begin.record()
    steps = [run_step(clock) for _ in range(5)]
    end.record()
    end.synchronize()
    whole = begin.elapsed_time(end) / 1e3
    # The time of the outer events belongs to no step.
    assert sum(seconds_of(marks) for marks in steps) == pytest.approx(whole, abs=10e-6)


def test_events_are_reused_but_by_one_step_at_a_time():
    clock = DeviceClock(DEVICE)
    for _ in range(3):
        steps = [run_step(clock) for _ in range(3)]
        torch.cuda.synchronize()
        assert all(seconds_of(marks) > 0 for marks in steps)
        assert [marks.seconds() for marks in steps] == [None] * 3
        assert len(clock._unused) == len({id(event) for event in clock._unused}) == 7


def test_idle_time_belongs_to_no_step():
    clock = DeviceClock(DEVICE)
    first = run_step(clock)
    torch.cuda.synchronize()
    time.sleep(0.5)
    second = run_step(clock)
    torch.cuda.synchronize()
    assert seconds_of(first) + seconds_of(second) < 0.5


def test_a_stream_waits_for_the_end_of_a_step():
    stream = torch.cuda.Stream()
    value = torch.zeros(1, device=DEVICE)
    marks = DeviceClock(DEVICE).begin()
    torch.cuda._sleep(CYCLES)
    value.fill_(1)
    marks.end()
    marks.hold(stream)
    with torch.cuda.stream(stream):
        seen = value.clone()
    stream.synchronize()
    assert seen.item() == 1
