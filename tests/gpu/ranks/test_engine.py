"""Engines over GPUs in every layout give the CPU's tokens, launched or from CUDA graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.driver import Driver, Ranks
from tests.gpu.hidden_waits import no_hidden_waits
from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.mpi import MPI
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
)
from trimaran.worker.config.experts_config import ExpertsConfig
from trimaran.worker.config.parallel_sizes import expert_sizes
from trimaran.worker.parallel.peer_sums import choose_sums

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
"""Model, ranks of a tensor group, stages, dp ranks, parts that share the experts out."""
if SIZE == 4:
    LAYOUTS += [
        ("llama", 2, 2, 1, 1),
        ("llama", 2, 1, 2, 1),
        ("mixtral", 2, 2, 1, 2),
        ("mixtral", 4, 1, 1, 2),
        ("mixtral", 2, 1, 2, 4),
    ]
LAUNCHED = {"collective_graphs": False, "all_reduce": "nccl", "prompt_graph_tokens": 0}
WAYS = {
    "launched": LAUNCHED,
    "graphs": {**LAUNCHED, "collective_graphs": True},
    "peer": {**LAUNCHED, "all_reduce": "peer"},
    "peer-graphs": {"collective_graphs": True, "all_reduce": "peer", "prompt_graph_tokens": 0},
    "fused": {**LAUNCHED, "all_reduce": "fused"},
    "fused-graphs": {"all_reduce": "fused"},
    "prompt-graphs": {"all_reduce": "nccl"},
    "defaults": {},
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


def serve_both(driver):
    return driver.serve(PROMPTS, SAMPLINGS), driver.serve(PROMPTS, PLAIN)


@pytest.fixture(scope="module")
def expected(world, folders):
    """On rank 0: the answers of one rank on the CPU, by model."""
    folders = folders if world.rank == 0 else {}
    return {
        name: serve_both(Driver(engine_config(folder, "cpu")))
        for name, folder in folders.items()
    }


class GpuRanks(Ranks):
    """An engine over all ranks of the run, driven from rank 0."""

    def __init__(self, world, folder, sizes, **changes):
        tp_size, pp_size, dp_size, ep_size = sizes
        experts = expert_sizes(-1, ep_size if ep_size > 1 else -1, tp_size, dp_size)
        parallel = ParallelConfig(
            tp_size=tp_size,
            pp_size=pp_size,
            dp_size=dp_size,
            moe_tp_size=experts[0],
            moe_ep_size=experts[1],
        )
        super().__init__(world, parallel, torch.device("cuda", world.local_rank), 60.0)
        config = engine_config(folder, "cuda", parallel, **changes)
        self.driver = Driver(config, ties=self.ties)
        self.engine = self.driver.engine

    def drive(self, drive):
        """The result of ``drive`` on rank 0, while the other ranks execute its steps."""
        return self.run(self.driver, drive)


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: "-".join(map(str, each)))
def test_tokens_in_float32_are_those_of_the_cpu(world, folders, expected, layout, way):
    model, *sizes = layout
    ranks = GpuRanks(world, folders[model], sizes, **WAYS[way])
    facts = ranks.engine.facts()

    outputs = ranks.drive(serve_both)

    is_sharing = sizes[2] > 1 and sizes[3] > 1
    has_collectives = sizes[0] > 1 or is_sharing
    is_launched = has_collectives and WAYS[way].get("collective_graphs") is False
    assert (facts["cuda_graphs"] == 0) is is_launched
    has_prompts = WAYS[way].get("prompt_graph_tokens") != 0 and not is_sharing
    assert (facts["prompt_graphs"] > 0) is has_prompts
    if world.rank == 0:
        assert outputs == expected[model]


def test_tensor_parallel_groups_sum_through_peer_memory_by_default(world, folders):
    config = engine_config(folders["llama"], "cuda")
    device = torch.device("cuda", world.local_rank)
    group = connect_group(world, device, 60.0)

    choose_sums(config, group, device)

    assert group.transports()["all_reduce"] == "peer one-shot (large: nccl)"
    group.close()


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
    experts = ExpertsConfig(rebalance_steps=5, num_redundant=sizes[3])
    ranks = GpuRanks(world, folders[model], sizes, collective_graphs=graphs, experts=experts)
    balancer = ranks.engine._loaded.expert_loads.balancer
    start = [each.experts.tolist() for each in balancer._placements]

    outputs = ranks.drive(serve_both)

    assert [each.experts.tolist() for each in balancer._placements] != start
    if world.rank == 0:
        assert outputs == expected[model]


@pytest.mark.parametrize("way", ["launched", "peer-graphs", "defaults"])
def test_a_step_makes_no_hidden_synchronization_with_the_device(world, folders, way):
    ranks = GpuRanks(world, folders["llama"], (SIZE, 1, 1, 1), **WAYS[way])

    def drive(driver):
        serve_both(driver)
        with no_hidden_waits():
            serve_both(driver)

    ranks.drive(drive)
