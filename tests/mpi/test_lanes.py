"""Data-parallel lanes give every request the tokens of one rank, and share experts or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from tests.unit.worker.lora_adapters import make_adapter, on_the_wire
from trimaran.comm import mpi
from trimaran.comm.collectives import SingleRankGroup, connect_group
from trimaran.comm.control import LocalControlPlane, connect_control
from trimaran.comm.messages import FinishReason, StepOutput, Submit, pack_ids
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
NUM_RANKS = mpi.MPI.COMM_WORLD.Get_size()
CPU = torch.device("cpu")
PROMPTS = [
    np.random.default_rng(length).integers(0, VOCAB, length) for length in (1, 16, 40, 70, 9)
]
SAMPLINGS = (
    {},
    {"top_k": 20, "seed": 3, "return_log_probs": True},
    {"top_p": 0.9, "seed": 4, "min_tokens": 3, "presence_penalty": 0.5},
    {"beam_width": 2, "num_return_sequences": 2, "repetition_penalty": 1.3},
    {"num_return_sequences": 2, "seed": 9, "temperature": 0.8},
)
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=3)
    ),
    "qwen2-moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **SHAPE, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=28,
            shared_expert_intermediate_size=36, mlp_only_layers=[1],
        )
    ),
}  # fmt: skip
# Tensor ranks, stages and parts of the experts' ranks; the other ranks are lanes.
LAYOUTS = {
    2: [("mixtral", 1, 1, 2), ("qwen2-moe", 1, 1, 2), ("llama", 1, 1, 1)],
    4: [("mixtral", 1, 1, 4), ("qwen2-moe", 2, 1, 4), ("qwen2-moe", 1, 2, 2),
        ("llama", 1, 2, 1)],
}  # fmt: skip


@pytest.fixture(scope="module")
def models(world, tmp_path_factory):
    """Folders of all models, by name, that rank 0 writes for all; and rank 0's models."""
    paths, theirs = {}, {}
    for name, make in MODELS.items() if world.rank == 0 else ():
        torch.manual_seed(3)
        theirs[name] = make().eval()
        paths[name] = str(tmp_path_factory.mktemp(name))
        theirs[name].save_pretrained(paths[name])
    return world.comm.bcast(paths), theirs


def rank_config(folder, parallel, **changes) -> RankConfig:
    scheduler = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "policy": "max_utilization"}
    cache = {"tokens_per_block": 16, "max_tokens": 256}
    for name, value in changes.items():
        (cache if name in CacheConfig.__dataclass_fields__ else scheduler)[name] = value
    engine = EngineConfig(
        model="test",
        engine_dir=folder,
        device="cpu",
        dtype="float32",
        parallel=parallel,
        scheduler=SchedulerConfig(
            max_seq_len=100, max_input_len=99, max_beam_width=2, **scheduler
        ),
        cache=CacheConfig(**cache),
    )
    return RankConfig(engine=engine, group="test")


class Lanes:
    """An engine over all ranks of the run, driven from rank 0."""

    def __init__(self, world, folder, tp_size, pp_size, moe_ep_size, **changes) -> None:
        self.world = world
        dp_size = world.size // (tp_size * pp_size)
        # Experts stay inside a lane where one part is asked for.
        num_ranks = tp_size if moe_ep_size == 1 else tp_size * dp_size
        parallel = ParallelConfig(
            tp_size=tp_size,
            pp_size=pp_size,
            dp_size=dp_size,
            moe_tp_size=num_ranks // moe_ep_size,
            moe_ep_size=moe_ep_size,
        )
        layout = ParallelLayout(
            rank=world.rank, tp_size=tp_size, pp_size=pp_size, dp_size=dp_size,
            hosts=world.hosts,
        )  # fmt: skip
        self.group = connect_group(world.subgroup(layout.tp_ranks), CPU, 20.0)
        self.control = connect_control(world, 20.0)
        self.links = PipelineLinks.connect(world, layout, 20.0)
        if parallel.expert_lanes > 1:
            stage = world.subgroup(layout.stage_ranks)
            self.links.expert_ranks = connect_group(stage, CPU, 20.0)
        config = rank_config(folder, parallel, **changes)
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
        self.world.barrier(30.0, "all served")
        self.engine.shutdown()
        self.links.close()
        self.group.close()
        return result


def single(folder, drive, **changes):
    """The same on one rank."""
    engine = Engine(
        rank_config(folder, ParallelConfig(), **changes),
        ParallelLayout(),
        LocalControlPlane(),
        SingleRankGroup(),
    )
    engine.load()
    return drive(engine)


class Client:
    """Submits requests and collects what they are told."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.outputs = {}
        self.reasons = {}

    def submit(self, prompt, max_tokens=12, adapter_id=0, adapter=None, **sampling) -> int:
        number = len(self.outputs)
        self.outputs[number] = {}
        params = SamplingParams(max_tokens=max_tokens, **sampling).to_wire()
        ids = pack_ids(prompt)
        message = Submit(
            request_id=number, model="m", prompt_ids=ids, sampling=params,
            adapter_id=adapter_id, adapter=adapter,
        )  # fmt: skip
        self.engine.submit(0, message)
        return number

    def step(self) -> None:
        for _, message in self.engine.step().messages:
            assert isinstance(message, StepOutput)
            ids = iter(np.frombuffer(message.token_ids, dtype=np.int32).tolist())
            numbers = np.frombuffer(message.request_ids, dtype=np.uint64).tolist()
            indices = np.frombuffer(message.sequence_indices, dtype=np.uint16).tolist()
            counts = np.frombuffer(message.num_tokens, dtype=np.uint16).tolist()
            for row, (number, index) in enumerate(zip(numbers, indices, strict=True)):
                told = self.outputs[number].setdefault(index, [])
                told += [next(ids) for _ in range(counts[row])]
                beams = message.extras.get(row, {}).get("beams")
                if beams:
                    for index, raw in enumerate(beams["ids"]):
                        self.outputs[number][index] = np.frombuffer(raw, np.int32).tolist()
                self.reasons[number] = FinishReason(message.finish_reasons[row])

    def finish(self):
        while self.engine.has_work:
            self.step()
        return self.outputs


def serve_all(engine):
    """Outputs of all prompts under all samplings."""
    client = Client(engine)
    for prompt in PROMPTS:
        for sampling in SAMPLINGS:
            client.submit(prompt, **sampling)
    return client.finish()


def greedy(theirs, count=12):
    """What transformers generates from each prompt."""
    found = {}
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor(prompt)[None]
        with torch.inference_mode():
            full = theirs.generate(
                ids, max_new_tokens=count, do_sample=False, pad_token_id=0,
                attention_mask=torch.ones_like(ids),
            )  # fmt: skip
        found[number] = {0: full[0, ids.shape[1] :].tolist()}
    return found


@pytest.mark.parametrize(("name", "tp_size", "pp_size", "moe_ep_size"), LAYOUTS[NUM_RANKS])
def test_lanes_give_the_tokens_of_transformers(
    world, models, name, tp_size, pp_size, moe_ep_size
):
    folders, theirs = models
    lanes = Lanes(world, folders[name], tp_size, pp_size, moe_ep_size)

    def drive(engine):
        client = Client(engine)
        for prompt in PROMPTS:
            client.submit(prompt)
        used = {lane for lane, one in enumerate(engine.scheduler.lanes) if one.has_requests}
        return used, client.finish()

    found = lanes.run(drive)

    if world.rank == 0:
        used, outputs = found
        assert used == set(range(NUM_RANKS // (tp_size * pp_size)))
        assert outputs == greedy(theirs[name])


@pytest.mark.parametrize("name", ["mixtral", "llama"])
def test_whatever_requests_ask_lanes_give_the_tokens_of_one_rank(world, models, name):
    folder = models[0][name]
    moe_ep_size = 1 if name == "llama" else world.size

    outputs = Lanes(world, folder, 1, 1, moe_ep_size).run(serve_all)

    if world.rank == 0:
        assert outputs == single(folder, serve_all)


def test_adapters_prefixes_on_the_host_and_pauses_work_in_lanes(world, models):
    folder = models[0]["llama"]
    adapters = {task: make_adapter(folder, seed=task) for task in (5, 9)}
    small = {"max_tokens": 144, "host_bytes": 4 << 20}

    def drive(engine):
        client = Client(engine)
        for task in (0, 5, 9):
            for prompt in PROMPTS:
                brings = task and prompt is PROMPTS[0]
                client.submit(
                    prompt,
                    adapter_id=task,
                    adapter=on_the_wire(adapters[task]) if brings else None,
                )
        return client.finish()

    outputs = Lanes(world, folder, 1, 1, 1, **small).run(drive)

    if world.rank == 0:
        assert outputs == single(folder, drive, **small)


def test_cancelled_requests_leave_nothing_behind_in_any_lane(world, models):
    def drive(engine):
        client = Client(engine)
        for prompt in PROMPTS * 2:
            client.submit(prompt, max_tokens=25)
        for number in range(6):
            client.step()
            engine.cancel(0, [number])
        client.finish()
        free = [lane.cache.num_free for lane in engine.scheduler.lanes]
        return client.reasons, free, [lane.cache.num_blocks for lane in engine.scheduler.lanes]

    found = Lanes(world, models[0]["mixtral"], 1, 1, world.size).run(drive)

    if world.rank == 0:
        reasons, free, blocks = found
        ended = [reasons[number] for number in range(len(reasons))]
        assert ended == [FinishReason.CANCELLED] * 6 + [FinishReason.LENGTH] * 4
        assert free == blocks


def test_lanes_on_two_hosts_share_experts(two_host_world, models):
    folders, theirs = models
    lanes = Lanes(two_host_world, folders["mixtral"], 1, 1, two_host_world.size)

    def drive(engine):
        client = Client(engine)
        for prompt in PROMPTS:
            client.submit(prompt)
        return client.finish()

    transports = lanes.links.transports()
    outputs = lanes.run(drive)

    assert transports["expert_all_to_all"] == "gloo"
    if two_host_world.rank == 0:
        assert "tcp" in transports["results"]
        assert outputs == greedy(theirs["mixtral"])
