"""The number of calls in the timing of a kernel."""

from __future__ import annotations

import time

import torch

from trimaran.bench.kernels.kernel_timing import seconds_a_call

CPU = torch.device("cpu")


def test_slow_calls_are_repeated_only_a_few_times():
    calls = []

    def call():
        calls.append(time.sleep(0.6))

    # With the number of calls of a short kernel this test would take more than two minutes.
    assert seconds_a_call([call] * 32, CPU) >= 0.6
    assert 2 <= len(calls) <= 8
