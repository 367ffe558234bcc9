"""Adapters over several ranks: each has its share, and together they give one rank's tokens."""

from __future__ import annotations

import numpy as np
import torch

from tests.mpi.test_engine import DEVICE, HAS_GPUS, PROMPTS, folder, make_engine
from tests.unit.worker.lora_adapters import make_adapter, on_the_wire
from trimaran.comm.collectives import SingleRankGroup, connect_group
from trimaran.comm.control import LocalControlPlane, connect_control
from trimaran.comm.messages import Submit, pack_ids
from trimaran.comm.sampling_params import SamplingParams
from trimaran.comm.topology import ParallelLayout

__all__ = ["folder"]
TASKS = (0, 5, 9)


def serve(engine, adapters):
    """Outputs of all prompts without an adapter and with each; the first brings it along."""
    outputs = {}
    for prompt in PROMPTS:
        for task in TASKS:
            is_first = task and prompt is PROMPTS[0]
            outputs[len(outputs)] = []
            message = Submit(
                request_id=len(outputs) - 1,
                model="m",
                prompt_ids=pack_ids(prompt),
                sampling=SamplingParams(max_tokens=12).to_wire(),
                adapter_id=task,
                adapter=on_the_wire(adapters[task]) if is_first else None,
            )
            engine.submit(0, message)
    while engine.has_work:
        for _, message in engine.step().messages:
            ids = iter(np.frombuffer(message.token_ids, dtype=np.int32).tolist())
            requests = np.frombuffer(message.request_ids, dtype=np.uint64).tolist()
            counts = np.frombuffer(message.num_tokens, dtype=np.uint16).tolist()
            for request, count in zip(requests, counts, strict=True):
                outputs[request] += [next(ids) for _ in range(count)]
    return outputs


def test_all_ranks_together_give_the_tokens_of_one(world, folder):
    device = torch.device("cuda", world.rank) if HAS_GPUS else torch.device(DEVICE)
    group = connect_group(world, device, 20.0)
    control = connect_control(world, 20.0)
    layout = ParallelLayout(rank=world.rank, tp_size=world.size, hosts=world.hosts)
    engine = make_engine(folder, layout, control, group, 2)
    if world.rank == 0:
        adapters = {task: make_adapter(folder, seed=task) for task in TASKS[1:]}
        outputs = serve(engine, adapters)
        control.close()
        single = make_engine(
            folder, ParallelLayout(), LocalControlPlane(), SingleRankGroup(), 1
        )
        assert outputs == serve(single, adapters)
        assert len(set(map(tuple, outputs.values()))) == len(outputs)
    else:
        while (payload := control.receive()) is not None:
            engine.follow(payload)
    world.barrier(30.0, "all served")
    group.close()
