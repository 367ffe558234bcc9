"""Pipeline stages on several ranks give the tokens of one rank, whatever their requests ask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from trimaran.comm import mpi
from trimaran.comm.collectives import SingleRankGroup, connect_group
from trimaran.comm.control import LocalControlPlane, connect_control
from trimaran.comm.errors import PeerLostError
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
    """By name a Hugging Face folder that rank 0 writes for all, and rank 0's model of it."""
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


class Ranks:
    """What ties the ranks of the run together as stages."""

    def __init__(self, world, pp_size) -> None:
        self.world = world
        device = torch.device("cuda", world.rank) if HAS_GPUS else torch.device("cpu")
        layout = ParallelLayout(
            rank=world.rank,
            pp_size=pp_size,
            tp_size=world.size // pp_size,
            hosts=world.hosts,
        )
        self.group = connect_group(world.subgroup(layout.tp_ranks), device, 20.0)
        self.control = connect_control(world, 20.0)
        self.links = PipelineLinks.connect(world, layout, 20.0)
        self.ties = (layout, self.control, self.group, self.links)

    def run(self, engine, drive):
        """What ``drive`` returns on rank 0; the other ranks follow meanwhile."""
        result = None
        if self.world.rank == 0:
            result = drive(engine)
            self.control.close()
        else:
            while (payload := self.control.receive()) is not None:
                engine.follow(payload)
        self.world.barrier(30.0, "all served")
        engine.shutdown()
        self.links.close()
        self.group.close()
        return result


def make_engine(folder, ties, **changes):
    scheduler = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "policy": "max_utilization"}
    cache = {"tokens_per_block": 16, "max_tokens": 256}
    sizes = {"tp_size": ties[0].tp_size, "pp_size": ties[0].pp_size}
    sizes["pp_partition"] = changes.pop("pp_partition", ())
    for name, value in changes.items():
        (cache if name in CacheConfig.__dataclass_fields__ else scheduler)[name] = value
    config = EngineConfig(
        model="test",
        engine_dir=folder,
        device="cuda" if HAS_GPUS else "cpu",
        dtype="float32",
        parallel=ParallelConfig(**sizes),
        scheduler=SchedulerConfig(
            max_seq_len=100, max_input_len=99, max_beam_width=2, **scheduler
        ),
        cache=CacheConfig(**cache),
    )
    engine = Engine(RankConfig(engine=config, group="test"), *ties)
    engine.load()
    return engine


def single(folder, drive, **changes):
    """The same on one rank."""
    ties = (ParallelLayout(), LocalControlPlane(), SingleRankGroup())
    return drive(make_engine(folder, ties, **changes))


def serve(engine, samplings=SAMPLINGS):
    """Outputs of all prompts under all samplings, by request id."""
    count = 0
    for prompt in PROMPTS:
        for sampling in samplings:
            params = SamplingParams(max_tokens=12, **sampling).to_wire()
            ids = pack_ids(prompt)
            engine.submit(
                0, Submit(request_id=count, model="m", prompt_ids=ids, sampling=params)
            )
            count += 1
    outputs = {number: [] for number in range(count)}
    while engine.has_work:
        for _, message in engine.step().messages:
            assert isinstance(message, StepOutput)
            ids = iter(np.frombuffer(message.token_ids, dtype=np.int32).tolist())
            request_ids = np.frombuffer(message.request_ids, dtype=np.uint64)
            counts = np.frombuffer(message.num_tokens, dtype=np.uint16)
            for request_id, num_tokens in zip(request_ids.tolist(), counts, strict=True):
                outputs[request_id] += [next(ids) for _ in range(num_tokens)]
            for row, extras in message.extras.items():
                if "beams" in extras:
                    beams = [np.frombuffer(raw, np.int32) for raw in extras["beams"]["ids"]]
                    outputs[int(request_ids[row])] = [ids.tolist() for ids in beams]
    return outputs


def greedy(theirs, count):
    """What transformers generates from each prompt."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor(prompt)[None]
        with torch.inference_mode():
            full = theirs.generate(
                ids, max_new_tokens=count, do_sample=False, pad_token_id=0,
                attention_mask=torch.ones_like(ids),
            )  # fmt: skip
        found.append(full[0, ids.shape[1] :].tolist())
    return found


@pytest.mark.parametrize("name", list(MODELS))
def test_one_stage_a_rank_gives_the_tokens_of_transformers(world, models, name):
    folder, theirs = models[name]
    ranks = Ranks(world, pp_size=world.size)

    outputs = ranks.run(make_engine(folder, ranks.ties), lambda engine: serve(engine, [{}]))

    if world.rank == 0:
        assert list(outputs.values()) == greedy(theirs, 12)


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
    ranks = Ranks(world, pp_size=2)

    engine = make_engine(folder, ranks.ties, **changes)
    # Again where the second time finds what the host kept.
    times = 2 if "host_bytes" in changes else 1
    outputs = ranks.run(engine, lambda engine: [serve(engine) for _ in range(times)])

    if world.rank == 0:
        one = {
            name: value
            for name, value in changes.items()
            if name not in ("depth", "pp_partition")
        }
        assert outputs == single(folder, lambda engine: [serve(engine)] * times, **one)


def test_stages_on_two_hosts_give_the_tokens_of_transformers(two_host_world, models):
    folder, theirs = models["llama"]
    ranks = Ranks(two_host_world, pp_size=two_host_world.size)

    outputs = ranks.run(make_engine(folder, ranks.ties), lambda engine: serve(engine, [{}]))

    if two_host_world.rank == 0:
        assert list(outputs.values()) == greedy(theirs, 12)
        assert ranks.links.transports() == {"stages": "gloo", "results": "tcp"}


def test_a_stage_that_hears_nothing_names_the_one_before(world):
    ranks = Ranks(world, pp_size=world.size)
    ranks.links.open(ranks.ties[0], torch.device("cpu"), (4, 8), torch.float32)
    ranks.links.set_timeout(0.05)

    if world.rank > 0:
        with pytest.raises(PeerLostError, match="the pipeline stage before sent no hidden"):
            ranks.links.previous.receive(2)
    else:
        with pytest.raises(PeerLostError, match=f"rank {world.size - 1} told no result"):
            ranks.links.readers[world.size - 1].read()
    world.barrier(30.0, "all gave up")
    ranks.links.close()
    ranks.group.close()
