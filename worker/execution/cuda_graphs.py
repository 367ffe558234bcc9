"""CUDA graphs of steps: which sizes are captured, their capture and their replay."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_config import EngineConfig
from trimaran.worker.parallel.tensor_parallel import MOST_TO_ALL
from trimaran.worker.steps.step_types import SchedulerOutput

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


PROMPT_TOKENS = 1024
"""Steps with prompts are captured up to here unless told otherwise: of more tokens a GPU
takes longer than its host for the launches, with a model of 8B parameters."""

LONGEST_DECODE = 8192
"""Tokens of a sequence that may decode in a graph of a step with prompts. The kernel of
prompts reads a sequence by one block a key-value head, that of decodes by the whole GPU: at
this length a layer's attention takes some 60 us longer, which is less than launches cost."""


MOST_DECODES = 128
"""Sequences that may decode in a graph of a step with prompts. By the kernel of prompts 64 of
them take 10 us a layer longer, 256 take 31 and 768 take 83; with as many the device has more
work than its host in any case. On an H200 of 8B parameters, prompts of 128 and 1,000 tokens
beside 256 decodes lost 0.6 and 4 % in graphs, beside 768 6 %, and arrivals of 467 tokens
beside some 20 had their first token after two thirds of the time."""


def choose_graphs(
    config: EngineConfig, topology: ParallelLayout, device: torch.device
) -> tuple[list[int], list[int]]:
    """Sizes of the decodes to capture, and of the steps with prompts; none where graphs are
    off or have no place.

    Raises:
        ConfigError: something is to be captured that cannot be.
    """
    launched = _why_decodes_are_launched(config, topology, device)
    most = _most_prompt_tokens(config, launched)
    if config.lora.has_graphs and launched:
        raise ConfigError(
            f"adapter-graphs is set but {launched}: such steps are not captured then. Serve "
            "without it."
        )
    if launched:
        if device.type == "cuda":
            logger.info("no CUDA graphs, steps are launched: %s", launched)
        return [], []
    limits = config.scheduler
    sizes = graph_sizes(limits.max_num_seqs, config.max_cuda_graphs)
    if config.parallel.expert_lanes > 1:
        # Of more tokens the host has to know how many go to each rank.
        sizes = [size for size in sizes if size <= MOST_TO_ALL]
    return sizes, prompt_graph_sizes(min(most, limits.max_num_batched_tokens))


def suits_a_graph(decision: SchedulerOutput) -> bool:
    """Whether a step's decodes are few enough, and short enough, to be served as prompts."""
    computed = decision.num_computed_tokens[: decision.num_decodes]
    if not len(computed):
        return True
    return len(computed) <= MOST_DECODES and int(computed.max()) < LONGEST_DECODE


def _why_decodes_are_launched(
    config: EngineConfig, topology: ParallelLayout, device: torch.device
) -> str:
    """Empty where decodes are captured."""
    is_sharing = config.parallel.expert_lanes > 1
    if device.type != "cuda":
        return f"the device is {device.type}"
    if not config.cuda_graphs:
        return "cuda_graph_mode is false"
    if topology.tp_size == 1 and not is_sharing:
        return ""
    if config.collective_graphs is False:
        who = "lanes share experts" if is_sharing else f"tp_size is {topology.tp_size}"
        return f"{who}, with --no-collective-graphs"
    ranks = topology.stage_ranks if is_sharing else topology.tp_ranks
    num_hosts = len({topology.hosts[rank] for rank in ranks}) if topology.hosts else 1
    if num_hosts > 1 and not config.collective_graphs:
        # Sums over a network have not been tried from graphs: who wants them says so.
        who = "lanes that share experts" if is_sharing else "a tensor group"
        return f"{who} on {num_hosts} hosts, without --collective-graphs"
    return ""


def _most_prompt_tokens(config: EngineConfig, launched: str) -> int:
    """Up to how many tokens steps with prompts are captured, where decodes are launched for
    that reason."""
    reason = launched
    if not reason and config.deterministic:
        # Decodes beside prompts get the kernel of prompts, as those that stand alone do not.
        reason = "tokens shall be deterministic"
    if not reason and config.parallel.expert_lanes > 1:
        # All lanes' graphs must be of one size, and there are other sizes of decodes.
        reason = "lanes share experts"
    most = config.prompt_graph_tokens
    if most and reason:
        raise ConfigError(
            f"prompt-graph-tokens is {most} but {reason}: such steps are not captured then. "
            "Serve without it."
        )
    if most is None:
        # A given number of decode graphs asks for no graphs of another kind.
        return 0 if reason or config.max_cuda_graphs else PROMPT_TOKENS
    return most
