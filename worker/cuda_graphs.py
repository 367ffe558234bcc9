"""CUDA graphs of decode steps: captured once a size, replayed for every step that fits."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def graph_sizes(max_num_seqs: int, max_graphs: int = 0) -> list[int]:
    """Sequences of the steps that are captured, ascending; the last is ``max_num_seqs``.

    Close together where a decode is short and padding would show: 1, 2, 4, then every 8 up
    to 64, every 16 up to 256, every 32 beyond. ``max_graphs`` keeps the smallest; 0 all.
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_num_seqs + 32, 32)]
    sizes = [size for size in sizes if size < max_num_seqs] + [max_num_seqs]
    return sizes[:max_graphs] if max_graphs else sizes


class CudaGraphs:
    """The captured sizes of a uniform decode step, one token a sequence.

    A graph reads and writes the addresses that it saw at capture: inputs lie in fixed
    memory, the KV cache is allocated before. All graphs share one memory pool, which is
    safe because steps run one after another. Freed before communicators are.
    """

    def __init__(self, sizes: list[int], forward: Callable[[int], Tensor]) -> None:
        """``forward`` launches a decode of so many sequences, in the fixed memory."""
        self._sizes = sizes
        self._forward = forward
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def pick(self, num_seqs: int) -> int:
        """The smallest captured size that holds ``num_seqs``; 0 if none does."""
        place = bisect_left(self._sizes, num_seqs)
        return self._sizes[place] if place < len(self._sizes) else 0

    @torch.inference_mode()
    def capture(self, device: torch.device) -> None:
        """Capture all sizes, the largest first: the smaller ones then reuse its memory."""
        start = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for size in reversed(self._sizes):
                # Outside of a graph first: kernels are compiled, handles made.
                self._forward(size)
                graph = torch.cuda.CUDAGraph()
                # Not `torch.cuda.graph`: it collects garbage before every capture.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self._outputs[size] = self._forward(size)
                finally:
                    graph.capture_end()
                self._graphs[size] = graph
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        logger.info(
            "captured %d CUDA graphs of up to %d sequences in %.1f s",
            len(self._sizes),
            self._sizes[-1],
            time.monotonic() - start,
        )

    def replay(self, size: int) -> Tensor:
        """Launch a captured step; what its forward returned, overwritten by the next."""
        self._graphs[size].replay()
        return self._outputs[size]

    def close(self) -> None:
        """Free the graphs; the device has finished them."""
        self._graphs.clear()
        self._outputs.clear()
