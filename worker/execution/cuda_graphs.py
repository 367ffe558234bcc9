"""CUDA graphs of steps: captured once a size, replayed for every step that fits."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

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


def prompt_graph_sizes(max_num_tokens: int) -> list[int]:
    """Tokens of the steps with prompts that are captured, ascending; the last is given.

    Multiples of 64 beyond the first, as products take rows by the 64.
    """
    sizes = [size for size in (16, 32, *range(64, max_num_tokens, 64)) if size < max_num_tokens]
    return [*sizes, max_num_tokens] if max_num_tokens else []


class CudaGraphs:
    """The captured sizes of one kind of step: of decodes, or of any sequences.

    A graph reads and writes the addresses that it saw at capture: inputs lie in fixed
    memory, the KV cache is allocated before. All graphs share one memory pool, which is
    safe because steps run one after another. Freed before communicators are.
    """

    def __init__(
        self, kind: str, sizes: list[int], forward: Callable[[int], Tensor], pool: Any
    ) -> None:
        """``forward`` launches a step of so many tokens, in the fixed memory; ``kind`` names
        such steps in the log, and ``pool`` is torch's name of the memory."""
        self._kind = kind
        self.sizes = sizes
        self._forward = forward
        self._pool = pool
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def pick(self, num_tokens: int) -> int:
        """The smallest captured size that holds ``num_tokens``; 0 if none does."""
        place = bisect_left(self.sizes, num_tokens)
        return self.sizes[place] if place < len(self.sizes) else 0

    @torch.inference_mode()
    def capture(self, device: torch.device) -> None:
        """Capture all sizes, the largest first: the smaller ones then reuse its memory."""
        start = time.monotonic()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for size in reversed(self.sizes):
                # Outside of a graph first: kernels are compiled, handles made.
                self._forward(size)
                graph = torch.cuda.CUDAGraph()
                # Not `torch.cuda.graph`: it collects garbage before every capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    self._outputs[size] = self._forward(size)
                finally:
                    graph.capture_end()
                self._graphs[size] = graph
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        logger.info(
            "captured %d CUDA graphs of up to %d %s in %.1f s",
            len(self.sizes),
            self.sizes[-1],
            self._kind,
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
