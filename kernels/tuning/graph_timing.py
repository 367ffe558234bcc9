"""Times CUDA graphs, without the host's launches."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of one call's launches, captured after a first call and replayed once."""
    # Inputs were created on another stream.
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
    graph.replay()
    return graph


def replays_s(graph: torch.cuda.CUDAGraph, count: int = 1) -> float:
    """Mean time of some consecutive replays."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count
