"""A model served by an engine over all ranks of the run, asked for greedy tokens and logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trimaran.comm import mpi
from trimaran.comm.collectives import SingleRankGroup, connect_group
from trimaran.comm.control import LocalControlPlane, connect_control
from trimaran.comm.messages import StepOutput, Submit, pack_ids
from trimaran.comm.pipeline import PipelineLinks
from trimaran.comm.sampling_params import SamplingParams
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    RankConfig,
    SchedulerConfig,
)
from trimaran.worker.engine import Engine

HAS_GPUS = torch.cuda.device_count() >= mpi.MPI.COMM_WORLD.Get_size()
TIMEOUT_S = 60.0


@dataclass(slots=True)
class Answer:
    """What an engine told of one request."""

    token_ids: list[int] = field(default_factory=list)
    context_logits: list[bytes] = field(default_factory=list)
    generation_logits: list[bytes] = field(default_factory=list)

    def logits(self, vocab_size: int) -> Tensor:
        """Those of the prompt and then of the output [tokens, V]; of its last token none."""
        rows = np.frombuffer(b"".join(self.context_logits + self.generation_logits), "<f4")
        # The prompt's last token has the logits of the first output.
        whole = torch.from_numpy(rows.copy()).view(-1, vocab_size)
        num_outputs = len(self.token_ids)
        return torch.cat((whole[:-num_outputs], whole[1 - num_outputs :]))


def rank_config(folder: Path, parallel: ParallelConfig) -> RankConfig:
    """An engine whose steps hold a part of a long prompt beside other requests' tokens."""
    engine = EngineConfig(
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
    return RankConfig(engine=engine, group="test")


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
    layout = ParallelLayout(
        rank=world.rank, tp_size=parallel.tp_size, pp_size=parallel.pp_size,
        dp_size=parallel.dp_size, hosts=world.hosts,
    )  # fmt: skip
    if world.size == 1:
        engine = Engine(
            rank_config(folder, parallel), layout, LocalControlPlane(), SingleRankGroup()
        )
        engine.load()
        return _ask(engine, prompts, count)
    group = connect_group(world.subgroup(layout.tp_ranks), device, TIMEOUT_S)
    control = connect_control(world, TIMEOUT_S)
    links = PipelineLinks.connect(world, layout, TIMEOUT_S)
    if parallel.expert_lanes > 1:
        stage = world.subgroup(layout.stage_ranks)
        links.expert_ranks = connect_group(stage, device, TIMEOUT_S)
    engine = Engine(rank_config(folder, parallel), layout, control, group, links)
    engine.load()
    answers: list[Answer] = []
    if layout.is_leader:
        answers = _ask(engine, prompts, count)
        control.close()
    else:
        while (payload := control.receive()) is not None:
            engine.follow(payload)
    world.barrier(TIMEOUT_S, "all served")
    engine.shutdown()
    links.close()
    group.close()
    return answers


def _ask(engine: Engine, prompts: Iterable[list[int]], count: int) -> list[Answer]:
    wants = {"return_context_logits": True, "return_generation_logits": True}
    sampling = SamplingParams(max_tokens=count, **wants).to_wire()
    answers: list[Answer] = []
    for number, prompt in enumerate(prompts):
        ids = pack_ids(prompt)
        message = Submit(request_id=number, model="m", prompt_ids=ids, sampling=sampling)
        engine.submit(0, message)
        answers.append(Answer())
    while engine.has_work:
        for _, message in engine.step().messages:
            assert isinstance(message, StepOutput), message
            _take(answers, message)
    return answers


def _take(answers: list[Answer], message: StepOutput) -> None:
    """Enter what one step told."""
    ids = iter(np.frombuffer(message.token_ids, np.int32).tolist())
    numbers = np.frombuffer(message.request_ids, np.uint64).tolist()
    counts = np.frombuffer(message.num_tokens, np.uint16).tolist()
    for row, (number, count) in enumerate(zip(numbers, counts, strict=True)):
        answer = answers[number]
        answer.token_ids += [next(ids) for _ in range(count)]
        extras = message.extras.get(row, {})
        answer.context_logits += extras.get("context_logits", ())
        answer.generation_logits += extras.get("generation_logits", ())
