"""CUDA graphs of steps: the captured sizes, the capture and the replay."""

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
from trimaran.worker.parallel.tensor_parallel import MAX_TO_ALL
from trimaran.worker.steps.step_types import SchedulerOutput

logger = logging.getLogger(__name__)


def graph_sizes(max_num_rows: int, max_graphs: int = 0) -> list[int]:
    """Numbers of rows for which decode steps are captured; the last is ``max_num_rows``.

    Dense where a decode is short and padding would show: 1, 2, 4, then multiples of 8 up to 64,
    of 16 up to 256, and of 32. ``max_graphs`` keeps the smallest sizes; 0 keeps all.
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_num_rows + 32, 32)]
    sizes = [size for size in sizes if size < max_num_rows] + [max_num_rows]
    return sizes[:max_graphs] if max_graphs else sizes


def prompt_graph_sizes(max_num_tokens: int) -> list[int]:
    """Numbers of tokens for which steps with prompts are captured; the last is the maximum.

    Multiples of 64 after the first size, because matrix products have tiles of 64 rows.
    """
    sizes = [size for size in (16, 32, *range(64, max_num_tokens, 64)) if size < max_num_tokens]
    return [*sizes, max_num_tokens] if max_num_tokens else []


class CudaGraphs:
    """The captured sizes of one kind of step: decodes, or any sequences.

    A graph reads and writes the addresses of its capture, so inputs lie in fixed memory, and
    the KV cache is allocated before. All graphs share one memory pool, which is safe because
    steps run one after another. Close graphs before communicators.
    """

    def __init__(
        self,
        kind: str,
        sizes: list[int],
        forward: Callable[[int], Tensor],
        pool: Any,
        warm_up: Callable[[int], object] | None = None,
    ) -> None:
        """``forward`` launches a step of so many tokens in fixed memory, and ``warm_up`` those
        kernels of the step that other graphs of this size do not have, by default all.
        ``kind`` names such steps in the log; ``pool`` is the handle of torch's memory pool."""
        self._kind = kind
        self.sizes = sizes
        self._forward = forward
        self._warm_up = warm_up or forward
        self._pool = pool
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def pick(self, num_tokens: int) -> int:
        """The smallest captured size that holds ``num_tokens``; 0 if all are smaller."""
        index = bisect_left(self.sizes, num_tokens)
        return self.sizes[index] if index < len(self.sizes) else 0

    @torch.inference_mode()
    def capture(self, device: torch.device) -> None:
        """Capture all sizes, the largest first, so that smaller graphs reuse its memory."""
        start = time.monotonic()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for size in reversed(self.sizes):
                # Run once without a graph first, which compiles kernels and makes library
                # handles.
                self._warm_up(size)
                graph = torch.cuda.CUDAGraph()
                # `torch.cuda.graph` is not used: it collects garbage before every capture.
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
        """Launch a captured step. Returns its output, which the next replay overwrites."""
        self._graphs[size].replay()
        return self._outputs[size]

    def close(self) -> None:
        """Free the graphs. The device must have finished them."""
        self._graphs.clear()
        self._outputs.clear()


PROMPT_TOKENS = 1024
"""Default size, in tokens, up to which steps with prompts are captured: for larger steps of
an 8B model, a GPU takes longer than the host takes for the launches."""

LONGEST_DECODE = 8192
"""Longest sequence, in tokens, that may decode in a graph of a step with prompts. The prompt
kernel reads a sequence with one block a key-value head, the decode kernel with the whole GPU.
At this length a layer's attention takes some 60 us longer, less than the launches cost."""


MAX_DECODES = 128
"""Most sequences that may decode in a graph of a step with prompts. With the prompt kernel a
layer takes 10 us longer for 64 sequences, 31 us for 256 and 83 us for 768, and the GPU is then
busy for longer than the host anyway. Measured on an H200 with an 8B model: prompts of 128 and
1,000 tokens beside 256 decodes lost 0.6 and 4 % in graphs, and 6 % beside 768. Prompts of 467
tokens beside some 20 decodes had their first token in two thirds of the time."""


def choose_graphs(
    config: EngineConfig, topology: ParallelLayout, device: torch.device
) -> tuple[list[int], list[int]]:
    """The sizes of the decode steps and of the steps with prompts that are captured; empty if
    graphs are off or not supported.

    Raises:
        ConfigError: a setting asks for graphs that cannot be captured.
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
    sizes = graph_sizes(limits.max_num_rows, config.max_cuda_graphs)
    if config.parallel.expert_dp_size > 1:
        # In larger steps the host must know the number of tokens sent to each rank.
        sizes = [size for size in sizes if size <= MAX_TO_ALL]
    return sizes, prompt_graph_sizes(min(most, limits.max_num_batched_tokens))


def fits_prompt_graph(decision: SchedulerOutput) -> bool:
    """Whether a step's decodes are few and short enough for the prompt kernel."""
    computed = decision.num_computed_tokens[: decision.num_decodes]
    if not len(computed):
        return True
    return len(computed) <= MAX_DECODES and int(computed.max()) < LONGEST_DECODE


def _why_decodes_are_launched(
    config: EngineConfig, topology: ParallelLayout, device: torch.device
) -> str:
    """The reason why decodes are not captured; empty if they are."""
    is_sharing = config.parallel.expert_dp_size > 1
    if device.type != "cuda":
        return f"the device is {device.type}"
    if not config.cuda_graphs:
        return "cuda_graph_mode is false"
    if topology.tp_size == 1 and not is_sharing:
        return ""
    if config.collective_graphs is False:
        who = "dp ranks share experts" if is_sharing else f"tp_size is {topology.tp_size}"
        return f"{who}, with --no-collective-graphs"
    ranks = topology.stage_ranks if is_sharing else topology.tp_ranks
    num_hosts = len({topology.hosts[rank] for rank in ranks}) if topology.hosts else 1
    if num_hosts > 1 and not config.collective_graphs:
        # Not tried: collectives over a network in graphs. The flag enables them.
        who = "dp ranks that share experts" if is_sharing else "a tensor group"
        return f"{who} on {num_hosts} hosts, without --collective-graphs"
    return ""


def _most_prompt_tokens(config: EngineConfig, launched: str) -> int:
    """The largest step with prompts that is captured, in tokens. ``launched`` is the reason
    why decodes are not captured, if they are not."""
    reason = launched
    if not reason and config.deterministic:
        # Decodes beside prompts would run the prompt kernel, other decodes the decode kernel.
        reason = "tokens shall be deterministic"
    if not reason and config.parallel.expert_dp_size > 1:
        # The graphs of all dp ranks must have the same size, but decode sizes are others.
        reason = "dp ranks share experts"
    most = config.prompt_graph_tokens
    if most and reason:
        raise ConfigError(
            f"prompt-graph-tokens is {most} but {reason}: such steps are not captured then. "
            "Serve without it."
        )
    if most is None:
        # A limit on decode graphs is taken to ask for few graphs, so none of this kind.
        return 0 if reason or config.max_cuda_graphs else PROMPT_TOKENS
    return most
