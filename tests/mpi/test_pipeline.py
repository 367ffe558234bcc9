"""Pipeline stages on several ranks give the tokens of one rank for all features of requests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.driver import Driver, Ranks
from tests.unit.worker.models.models import reference_greedy
from trimaran.comm import mpi
from trimaran.comm.deadlines import StepTimeouts
from trimaran.comm.errors import PeerLostError
from trimaran.comm.stages.pipeline import PipelineLinks
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
)
from trimaran.worker.rank import NEVER_S

VOCAB = 150
HAS_GPUS = torch.cuda.device_count() >= mpi.MPI.COMM_WORLD.Get_size()
PROMPTS = [
    np.random.default_rng(length).integers(0, VOCAB, length) for length in (1, 16, 40, 70)
]
SAMPLINGS = (
    {},
    {"top_k": 20, "seed": 3, "return_log_probs": True},
    {"top_p": 0.9, "seed": 4, "min_tokens": 3, "presence_penalty": 0.5},
    {"beam_width": 2, "num_return_sequences": 2, "repetition_penalty": 1.3},
)
COMMON = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3}
MODELS = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=5,
            num_attention_heads=8, num_key_value_heads=4, head_dim=8,
            max_position_embeddings=128, **COMMON,
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_embd=64, n_layer=5, n_head=4, n_positions=128, **COMMON
        )
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(world, tmp_path_factory):
    """By name: a Hugging Face folder that rank 0 writes for all ranks, and rank 0's model of
    the folder."""
    found = {}
    for name, make in MODELS.items():
        path, theirs = "", None
        if world.rank == 0:
            torch.manual_seed(3)
            path = str(tmp_path_factory.mktemp(name))
            theirs = make().eval()
            theirs.save_pretrained(path)
        found[name] = world.comm.bcast(path), theirs
    return found


def make_ranks(world, pp_size):
    """The ranks of the run as so many stages."""
    device = torch.device("cuda", world.rank) if HAS_GPUS else None
    parallel = ParallelConfig(pp_size=pp_size, tp_size=world.size // pp_size)
    return Ranks(world, parallel, device)


def engine_config(folder, pp_partition=(), layout=None, **changes):
    """The configuration of ``layout``, or of one rank."""
    layout = layout or ParallelLayout()
    scheduler = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "policy": "max_utilization"}
    cache = {"tokens_per_block": 16, "max_tokens": 256}
    for name, value in changes.items():
        (cache if name in CacheConfig.__dataclass_fields__ else scheduler)[name] = value
    return EngineConfig(
        model="test",
        engine_dir=folder,
        device="cuda" if HAS_GPUS else "cpu",
        # Ranks that are taken to be on several hosts have one each as well.
        gpu_device_ids=tuple(range(layout.world_size)) if HAS_GPUS else (),
        dtype="float32",
        parallel=ParallelConfig(
            tp_size=layout.tp_size, pp_size=layout.pp_size, pp_partition=pp_partition
        ),
        scheduler=SchedulerConfig(
            max_seq_len=100, max_input_len=99, max_beam_width=2, **scheduler
        ),
        cache=CacheConfig(**cache),
    )


def make_driver(folder, ranks, **changes):
    """An engine over all ranks."""
    return Driver(engine_config(folder, layout=ranks.ties[0], **changes), ties=ranks.ties)


def greedy(theirs):
    """The output of transformers for each prompt."""
    prompts = [prompt.tolist() for prompt in PROMPTS]
    return [[ids] for ids in reference_greedy(theirs, prompts, 12)]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", list(MODELS))
def test_one_stage_a_rank_gives_the_tokens_of_transformers(world, models, name):
    folder, theirs = models[name]
    ranks = make_ranks(world, pp_size=world.size)

    outputs = ranks.run(make_driver(folder, ranks), lambda driver: driver.serve(PROMPTS))

    if world.rank == 0:
        assert outputs == greedy(theirs)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        # Prompts in chunks, prefixes found again, sequences preempted, a step more in flight.
        {"max_tokens": 160, "max_num_batched_tokens": 24, "depth": 3, "host_bytes": 1 << 20},
        {
            "policy": "guaranteed_no_evict",
            "attention_windows": (50,),
            "num_sinks": 2,
            "depth": 1,
            "pp_partition": (1, 4),
        },
    ],
    ids=["plain", "preempted, in chunks", "windows, uneven stages, one step at a time"],
)
def test_stages_give_the_tokens_of_one_rank(world, models, changes):
    folder, _ = models["llama"]
    ranks = make_ranks(world, pp_size=2)

    # Again where the second time finds what the host kept.
    times = 2 if "host_bytes" in changes else 1

    def serve(driver):
        return [driver.serve(PROMPTS, SAMPLINGS) for _ in range(times)]

    outputs = ranks.run(make_driver(folder, ranks, **changes), serve)

    if world.rank == 0:
        one = {
            name: value
            for name, value in changes.items()
            if name not in ("depth", "pp_partition")
        }
        assert outputs == serve(Driver(engine_config(folder, **one)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("enable_block_reuse", [True, False])
def test_preempted_sequences_keep_their_kv_on_the_host_of_each_stage(
    world, models, enable_block_reuse
):
    folder, theirs = models["llama"]
    ranks = make_ranks(world, pp_size=2)
    prompts = [np.random.default_rng(seed).integers(0, VOCAB, 9) for seed in range(6)]
    host = {"host_bytes": 1 << 20, "enable_block_reuse": enable_block_reuse}

    def serve(driver):
        numbers = [driver.submit(prompt, max_tokens=90) for prompt in prompts]
        driver.run()
        scheduler = driver.engine.scheduler
        assert scheduler.preemptions.num_sequences > len(prompts)
        assert scheduler.cache.hosts[0].num_loaded > 0
        return [driver.output(number) for number in numbers]

    outputs = ranks.run(make_driver(folder, ranks, max_tokens=256, **host), serve)

    if world.rank == 0:
        assert outputs == reference_greedy(theirs, [p.tolist() for p in prompts], 90)


@pytest.mark.ranks(4)
def test_stages_on_two_hosts_give_the_tokens_of_transformers(two_host_world, models):
    folder, theirs = models["llama"]
    ranks = make_ranks(two_host_world, pp_size=two_host_world.size)
    driver = make_driver(folder, ranks)
    # A rank without a hang timeout does the same.
    driver.engine.links.set_timeouts(StepTimeouts.of(ranks.ties[0], NEVER_S))

    outputs = ranks.run(driver, lambda driver: driver.serve(PROMPTS))

    if two_host_world.rank == 0:
        assert outputs == greedy(theirs)
        stages = "nccl" if HAS_GPUS else "gloo"
        assert driver.engine.links.transports() == {"stages": stages, "results": "tcp"}


@pytest.mark.ranks(4)
def test_a_stage_without_input_names_the_stage_before(world):
    ranks = make_ranks(world, pp_size=world.size)
    layout, _, _, everyone = ranks.ties
    links = PipelineLinks.connect(everyone, layout, torch.device("cpu"), (4, 8), torch.float32)
    links.set_timeouts(StepTimeouts.of(layout, 0.05))

    if world.rank > 0:
        words = f"rank {world.rank - 1}, the stage before, sent no hidden states for 0.04"
        with pytest.raises(PeerLostError, match=words):
            links.previous.receive(2)
    else:
        with pytest.raises(PeerLostError, match=f"rank {world.size - 1} told no result"):
            links.readers[world.size - 1].read()
    world.barrier(60.0, "all gave up")
    links.close()
    ranks.group.close()
