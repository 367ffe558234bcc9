"""Engines over GPUs in every layout give the CPU's tokens, launched or from CUDA graphs."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from trimaran.comm.collectives import SingleRankGroup, connect_group
from trimaran.comm.control import LocalControlPlane, connect_control
from trimaran.comm.messages import StepOutput, Submit, pack_ids
from trimaran.comm.mpi import MPI
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
from trimaran.worker.experts_config import ExpertsConfig
from trimaran.worker.parallel_sizes import expert_sizes

pytestmark = pytest.mark.gpu

SIZE = MPI.COMM_WORLD.Get_size()
VOCAB = 1003
"""The last shards hold padding."""
PROMPTS = [
    np.random.default_rng(length).integers(0, VOCAB, length) for length in (1, 16, 40, 90)
]
SAMPLINGS = (
    {},
    {"top_k": 20, "seed": 3},
    {"top_p": 0.9, "seed": 4, "min_tokens": 3, "end_id": 7},
    {"top_p": 1.0, "seed": 5, "repetition_penalty": 1.2, "return_log_probs": True},
)
PLAIN = ({}, {"top_p": 1.0, "seed": 5}, {"top_p": 1.0, "temperature": 3.0, "seed": 6})
"""Together they are drawn without gathering logits."""
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 5,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 128, "initializer_range": 0.1,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2)
    ),
}
LAYOUTS = [
    ("llama", SIZE, 1, 1, 1),
    ("llama", 1, SIZE, 1, 1),
    ("llama", 1, 1, SIZE, 1),
    ("mixtral", SIZE, 1, 1, SIZE),
    ("mixtral", 1, 1, SIZE, SIZE),
]
"""Model, ranks of a tensor group, stages, lanes, parts that share the experts out."""
if SIZE == 4:
    LAYOUTS += [
        ("llama", 2, 2, 1, 1),
        ("llama", 2, 1, 2, 1),
        ("mixtral", 2, 2, 1, 2),
        ("mixtral", 4, 1, 1, 2),
        ("mixtral", 2, 1, 2, 4),
    ]
WAYS = {
    "launched": {},
    "graphs": {"collective_graphs": True},
    "peer": {"all_reduce": "peer"},
    "peer-graphs": {"collective_graphs": True, "all_reduce": "peer"},
    "prompt-graphs": {"collective_graphs": True, "prompt_graph_tokens": 48},
}


@pytest.fixture(scope="module")
def folders(world, tmp_path_factory):
    """Hugging Face folders that rank 0 writes for all, by name."""
    found = {}
    if world.rank == 0:
        for name, make in MODELS.items():
            torch.manual_seed(3)
            found[name] = str(tmp_path_factory.mktemp(name))
            make().save_pretrained(found[name])
    return world.comm.bcast(found)


def engine_config(folder, device, parallel=None, **changes):
    return EngineConfig(
        model="test",
        engine_dir=folder,
        device=device,
        dtype="float32",
        parallel=parallel or ParallelConfig(),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=48,
            max_num_seqs=12,
            max_seq_len=128,
            max_input_len=127,
            policy="max_utilization",
        ),
        cache=CacheConfig(tokens_per_block=16, max_tokens=240),
        **changes,
    )


def serve(engine, samplings):
    """Outputs of all prompts under all samplings, by request id."""
    requests = [(prompt, sampling) for prompt in PROMPTS for sampling in samplings]
    for number, (prompt, sampling) in enumerate(requests):
        params = SamplingParams(max_tokens=12, **sampling).to_wire()
        ids = pack_ids(prompt)
        engine.submit(0, Submit(request_id=number, model="m", prompt_ids=ids, sampling=params))
    outputs = {number: [] for number in range(len(requests))}
    while engine.has_work:
        for _, message in engine.step().messages:
            assert isinstance(message, StepOutput)
            ids = iter(np.frombuffer(message.token_ids, dtype=np.int32).tolist())
            numbers = np.frombuffer(message.request_ids, dtype=np.uint64).tolist()
            counts = np.frombuffer(message.num_tokens, dtype=np.uint16)
            for number, count in zip(numbers, counts, strict=True):
                outputs[number] += [next(ids) for _ in range(count)]
    return outputs


def serve_both(engine):
    return serve(engine, SAMPLINGS), serve(engine, PLAIN)


@pytest.fixture(scope="module")
def expected(world, folders):
    """On rank 0: what one rank on the CPU answers, by model."""
    found = {}
    for name, folder in folders.items() if world.rank == 0 else ():
        config = RankConfig(engine=engine_config(folder, "cpu"), group="test")
        engine = Engine(config, ParallelLayout(), LocalControlPlane(), SingleRankGroup())
        engine.load()
        found[name] = serve_both(engine)
    return found


class Ranks:
    """An engine over all ranks of the run, driven from rank 0."""

    def __init__(self, world, folder, sizes, **changes):
        self.world = world
        tp_size, pp_size, dp_size, ep_size = sizes
        axes = {"tp_size": tp_size, "pp_size": pp_size, "dp_size": dp_size}
        experts = expert_sizes(-1, ep_size if ep_size > 1 else -1, tp_size, dp_size)
        parallel = ParallelConfig(**axes, moe_tp_size=experts[0], moe_ep_size=experts[1])
        layout = ParallelLayout(rank=world.rank, **axes, hosts=world.hosts)
        device = torch.device("cuda", world.local_rank)
        self.group = connect_group(world.subgroup(layout.tp_ranks), device, 60.0)
        self.control = connect_control(world, 60.0)
        self.links = PipelineLinks.connect(world, layout, 60.0)
        if parallel.expert_lanes > 1:
            stage_world = world.subgroup(layout.stage_ranks)
            self.links.expert_ranks = connect_group(stage_world, device, 60.0)
        config = RankConfig(
            engine=engine_config(folder, "cuda", parallel, **changes), group="t"
        )
        self.engine = Engine(config, layout, self.control, self.group, self.links)
        self.engine.load()

    def run(self, drive):
        """What ``drive`` returns on rank 0; the other ranks follow meanwhile."""
        result = None
        if self.world.rank == 0:
            result = drive(self.engine)
            self.control.close()
        else:
            while (payload := self.control.receive()) is not None:
                self.engine.follow(payload)
        self.world.barrier(60.0, "all served")
        self.engine.shutdown()
        self.links.close()
        self.group.close()
        return result


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: "-".join(map(str, each)))
def test_tokens_in_float32_are_those_of_the_cpu(world, folders, expected, layout, way):
    model, *sizes = layout
    ranks = Ranks(world, folders[model], sizes, **WAYS[way])
    facts = ranks.engine.facts()

    outputs = ranks.run(serve_both)

    has_collectives = sizes[0] > 1 or (sizes[2] > 1 and sizes[3] > 1)
    is_launched = has_collectives and not WAYS[way].get("collective_graphs")
    assert (facts["cuda_graphs"] == 0) is is_launched
    if world.rank == 0:
        assert outputs == expected[model]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    "layout",
    [each for each in LAYOUTS if each[0] == "mixtral"],
    ids=lambda each: "-".join(map(str, each)),
)
def test_tokens_stay_those_of_the_cpu_while_experts_change_ranks(
    world, folders, expected, layout, graphs
):
    model, *sizes = layout
    experts = ExpertsConfig(rebalance_steps=5, num_redundant=4)
    ranks = Ranks(world, folders[model], sizes, collective_graphs=graphs, experts=experts)
    balancer = ranks.engine._loaded.expert_loads.balancer
    start = [each.experts.tolist() for each in balancer._placements]

    outputs = ranks.run(serve_both)

    assert [each.experts.tolist() for each in balancer._placements] != start
    if world.rank == 0:
        assert outputs == expected[model]


@pytest.mark.parametrize("way", ["launched", "peer-graphs"])
def test_a_step_makes_no_hidden_wait_for_the_device(world, folders, way):
    ranks = Ranks(world, folders["llama"], (SIZE, 1, 1, 1), **WAYS[way])

    def drive(engine):
        serve_both(engine)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return serve_both(engine)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with warnings.catch_warnings():
        # torch says that the mode is a prototype.
        warnings.simplefilter("ignore")
        ranks.run(drive)
