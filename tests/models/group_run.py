"""A model served by an engine over all ranks of the run: greedy tokens and logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.driver import Driver, Ranks
from trimaran.comm import mpi
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
)

HAS_GPUS = torch.cuda.device_count() >= mpi.MPI.COMM_WORLD.Get_size()
TIMEOUT_S = 60.0


@dataclass(slots=True)
class Answer:
    """The engine's messages for one request."""

    token_ids: list[int]
    context_logits: list[bytes]
    generation_logits: list[bytes]

    def logits(self, vocab_size: int) -> Tensor:
        """Logits of the prompt and then of the output [tokens, V], without its last token."""
        # The prompt's last token has the logits of the first output.
        outputs = self.chosen_from(vocab_size)[1:]
        return torch.cat((_rows(self.context_logits, vocab_size), outputs))

    def chosen_from(self, vocab_size: int) -> Tensor:
        """Those that each token of the output was chosen from [tokens, V]."""
        return _rows(self.generation_logits, vocab_size)


def _rows(pieces: list[bytes], vocab_size: int) -> Tensor:
    flat = torch.from_numpy(np.frombuffer(b"".join(pieces), "<f4").copy())
    return flat.view(-1, vocab_size)


def engine_config(folder: Path, parallel: ParallelConfig) -> EngineConfig:
    """An engine whose steps hold a chunk of a long prompt beside tokens of other requests."""
    return EngineConfig(
        model="test",
        engine_dir=str(folder),
        device="cuda" if HAS_GPUS else "cpu",
        dtype="float32",
        parallel=parallel,
        scheduler=SchedulerConfig(
            max_num_batched_tokens=40,
            max_num_seqs=8,
            max_seq_len=100,
            max_input_len=99,
            policy="max_utilization",
        ),
        cache=CacheConfig(tokens_per_block=4 if not HAS_GPUS else 16, max_tokens=1024),
    )


def serve(
    world: mpi.World,
    folder: Path,
    parallel: ParallelConfig,
    prompts: Iterable[list[int]],
    count: int,
) -> list[Answer]:
    """The answers to all prompts, asked together, each ``count`` tokens long; on rank 0.

    Collective over the world, whose size is that of the layout.
    """
    config = engine_config(folder, parallel)
    return run_group(world, config, lambda driver: ask(driver, prompts, count)) or []


def run_group(world: mpi.World, config: EngineConfig, drive: Callable[[Driver], Any]) -> Any:
    """The result of ``drive`` on rank 0, with an engine over the world. Collective."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if HAS_GPUS:
        # Kernels are launched on the current device, regardless of the tensors' device.
        device = torch.device("cuda", world.rank)
        torch.cuda.set_device(device)
    if world.size == 1:
        return drive(Driver(config))
    ranks = Ranks(world, config.parallel, device, TIMEOUT_S)
    return ranks.run(Driver(config, ties=ranks.ties), drive)


def ask(driver: Driver, prompts: Iterable[list[int]], count: int, **wants: Any) -> list[Answer]:
    """The answers to all prompts as concurrent requests, with all logits; ``wants`` changes
    the requested outputs."""
    wants = {"return_context_logits": True, "return_generation_logits": True, **wants}
    requests = [driver.submit(prompt, max_tokens=count, **wants) for prompt in prompts]
    driver.run()
    return [
        Answer(
            driver.output(request),
            driver.told(request, "context_logits"),
            driver.told(request, "generation_logits"),
        )
        for request in requests
    ]
