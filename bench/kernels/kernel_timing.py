"""Times one operator on a device: alternating inputs, no host work, median reported."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from trimaran.kernels.tuning.graph_timing import replays_s

_CACHE_BYTES = 256e6
"""Least total bytes of alternating inputs: more than the last-level cache."""

_CALLS = 24
_REPEATS = 7
_HOST_S = 3.5
"""Most time for calls on a CPU; at least one call each for warm-up and measurement."""

_COLLECTIVE_CALLS, _COLLECTIVE_REPLAYS = 40, 20

Inputs = TypeVar("Inputs")


def rotated(make: Callable[[], Inputs], num_bytes: float) -> list[Inputs]:
    """Several sets of inputs of ``num_bytes`` each."""
    return [make() for _ in range(max(2, min(16, int(_CACHE_BYTES / max(num_bytes, 1)) + 1)))]


def seconds_a_call(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Median time of one of ``calls``, which alternate.

    On a GPU they are replayed from a CUDA graph, so that the host's launches are not measured.
    """
    if device.type != "cuda":
        return _on_host(calls)
    # Inputs were created on another stream, which may reuse their memory.
    torch.cuda.synchronize(device)
    stream = _stream(device)
    with torch.inference_mode(), torch.cuda.stream(stream):
        for call in calls:
            call()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        count = max(1, _CALLS // len(calls))
        for _ in range(count):
            for call in calls:
                call()
        graph.capture_end()
        graph.replay()
        times = [replays_s(graph) for _ in range(_REPEATS)]
    del graph
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return statistics.median(times) / (count * len(calls))


def microseconds_of_collective(
    call: Callable[[], object], refresh: Callable[[], object] | None = None
) -> float:
    """Median time of one call that all ranks make, from a graph of many on the current device.

    ``refresh`` runs before each replay, untimed: sums of sums would overflow.
    """
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_COLLECTIVE_CALLS):
            call()
    times = []
    for _ in range(_COLLECTIVE_REPLAYS):
        if refresh is not None:
            refresh()
        torch.cuda.synchronize()
        times.append(replays_s(graph))
    # The graph is freed only when the device has finished it.
    torch.cuda.synchronize()
    return 1e6 * statistics.median(times) / _COLLECTIVE_CALLS


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all: freed memory is reused on its own stream alone."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]


def _on_host(calls: Sequence[Callable[[], object]]) -> float:
    """Median of some rounds after a warm-up round; slow calls have short rounds."""
    times: list[float] = []
    with torch.inference_mode():
        _round_s(calls)
        begin = time.perf_counter()
        while len(times) < _REPEATS and (not times or time.perf_counter() - begin < _HOST_S):
            times.append(_round_s(calls))
    return statistics.median(times)


def _round_s(calls: Sequence[Callable[[], object]]) -> float:
    """Mean time of alternating calls, or of as many as fit in the time."""
    times: list[float] = []
    begin = last = time.perf_counter()
    for call in calls:
        call()
        now = time.perf_counter()
        times.append(now - last)
        last = now
        if now - begin > _HOST_S / _REPEATS:
            break
    return statistics.fmean(times)
