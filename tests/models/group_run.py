"""A model served by an engine over all ranks of the run, asked for greedy tokens and logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.driver import Driver, Ranks
from trimaran.comm import mpi
from trimaran.worker.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig

HAS_GPUS = torch.cuda.device_count() >= mpi.MPI.COMM_WORLD.Get_size()
TIMEOUT_S = 60.0


@dataclass(slots=True)
class Answer:
    """What an engine told of one request."""

    token_ids: list[int]
    context_logits: list[bytes]
    generation_logits: list[bytes]

    def logits(self, vocab_size: int) -> Tensor:
        """Those of the prompt and then of the output [tokens, V]; of its last token none."""
        rows = np.frombuffer(b"".join(self.context_logits + self.generation_logits), "<f4")
        # The prompt's last token has the logits of the first output.
        whole = torch.from_numpy(rows.copy()).view(-1, vocab_size)
        num_outputs = len(self.token_ids)
        return torch.cat((whole[:-num_outputs], whole[1 - num_outputs :]))


def engine_config(folder: Path, parallel: ParallelConfig) -> EngineConfig:
    """An engine whose steps hold a part of a long prompt beside other requests' tokens."""
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
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if HAS_GPUS:
        # Kernels are launched on the current device, whatever their tensors say.
        device = torch.device("cuda", world.rank)
        torch.cuda.set_device(device)
    config = engine_config(folder, parallel)
    if world.size == 1:
        return _ask(Driver(config), prompts, count)
    ranks = Ranks(world, parallel, device, TIMEOUT_S)
    answers = ranks.run(
        Driver(config, ties=ranks.ties), lambda driver: _ask(driver, prompts, count)
    )
    return answers or []


def _ask(driver: Driver, prompts: Iterable[list[int]], count: int) -> list[Answer]:
    wants = {"return_context_logits": True, "return_generation_logits": True}
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
