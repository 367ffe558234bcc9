"""Data-parallel ranks give every request the tokens of one rank, and share experts or not."""

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

from tests.driver import Driver, Ranks
from tests.unit.worker.lora_adapters import make_adapter, on_the_wire
from tests.unit.worker.models.models import reference_greedy
from trimaran.comm import mpi
from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
)

VOCAB = 150
NUM_RANKS = mpi.MPI.COMM_WORLD.Get_size()
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
# Tensor-parallel ranks, stages and expert-parallel parts; dp ranks use the remaining ranks.
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


def engine_config(folder, parallel=None, **changes) -> EngineConfig:
    """The configuration of a layout, or of one rank."""
    scheduler = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "policy": "max_utilization"}
    cache = {"tokens_per_block": 16, "max_tokens": 256}
    for name, value in changes.items():
        (cache if name in CacheConfig.__dataclass_fields__ else scheduler)[name] = value
    return EngineConfig(
        model="test",
        engine_dir=folder,
        device="cpu",
        dtype="float32",
        parallel=parallel or ParallelConfig(),
        scheduler=SchedulerConfig(
            max_seq_len=100, max_input_len=99, max_beam_width=2, **scheduler
        ),
        cache=CacheConfig(**cache),
    )


class DataParallelRanks(Ranks):
    """An engine over all ranks of the run, driven from rank 0."""

    def __init__(self, world, folder, tp_size, pp_size, moe_ep_size, **changes) -> None:
        dp_size = world.size // (tp_size * pp_size)
        # With one part, experts stay inside a dp rank.
        num_ranks = tp_size if moe_ep_size == 1 else tp_size * dp_size
        parallel = ParallelConfig(
            tp_size=tp_size,
            pp_size=pp_size,
            dp_size=dp_size,
            moe_tp_size=num_ranks // moe_ep_size,
            moe_ep_size=moe_ep_size,
        )
        super().__init__(world, parallel)
        self.driver = Driver(engine_config(folder, parallel, **changes), ties=self.ties)

    def drive(self, drive):
        """The result of ``drive`` on rank 0, while the other ranks execute its steps."""
        return self.run(self.driver, drive)


def single(folder, drive, **changes):
    """The same on one rank."""
    return drive(Driver(engine_config(folder, **changes)))


def serve_all(driver):
    """Outputs of all prompts under all samplings."""
    return driver.serve(PROMPTS, SAMPLINGS)


def greedy(theirs):
    """The output of transformers for each prompt."""
    prompts = [prompt.tolist() for prompt in PROMPTS]
    return [[ids] for ids in reference_greedy(theirs, prompts, 12)]


@pytest.mark.parametrize(("name", "tp_size", "pp_size", "moe_ep_size"), LAYOUTS[NUM_RANKS])
def test_dp_ranks_give_the_tokens_of_transformers(
    world, models, name, tp_size, pp_size, moe_ep_size
):
    folders, theirs = models
    dp_ranks = DataParallelRanks(world, folders[name], tp_size, pp_size, moe_ep_size)

    def drive(driver):
        requests = [driver.submit(prompt, max_tokens=12) for prompt in PROMPTS]
        dp_ranks = driver.engine.scheduler.ranks
        used = {number for number, rank in enumerate(dp_ranks) if rank.has_requests}
        driver.run()
        return used, [driver.outputs(request) for request in requests]

    found = dp_ranks.drive(drive)

    if world.rank == 0:
        used, outputs = found
        assert used == set(range(NUM_RANKS // (tp_size * pp_size)))
        assert outputs == greedy(theirs[name])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["mixtral", "llama"])
def test_dp_ranks_give_the_tokens_of_one_rank_for_random_requests(world, models, name):
    folder = models[0][name]
    moe_ep_size = 1 if name == "llama" else world.size

    outputs = DataParallelRanks(world, folder, 1, 1, moe_ep_size).drive(serve_all)

    if world.rank == 0:
        assert outputs == single(folder, serve_all)


@pytest.mark.ranks(2)
def test_adapters_host_prefixes_and_preemption_work_in_dp_ranks(world, models):
    folder = models[0]["llama"]
    adapters = {task: make_adapter(folder, seed=task) for task in (5, 9)}
    small = {"max_tokens": 144, "host_bytes": 4 << 20}

    def drive(driver):
        requests = []
        for task in (0, 5, 9):
            for prompt in PROMPTS:
                brings = task and prompt is PROMPTS[0]
                adapter = on_the_wire(adapters[task]) if brings else None
                requests.append(
                    driver.submit(prompt, max_tokens=12, adapter_id=task, adapter=adapter)
                )
        driver.run()
        return [driver.outputs(request) for request in requests]

    outputs = DataParallelRanks(world, folder, 1, 1, 1, **small).drive(drive)

    if world.rank == 0:
        assert outputs == single(folder, drive, **small)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("is_running", [True, False])
def test_adapters_are_sent_in_chunks_while_any_dp_rank_runs(
    world, models, monkeypatch, is_running
):
    for module in ("lora.adapter_messages", "lora.manager", "scheduling.data_parallel"):
        monkeypatch.setattr(f"trimaran.worker.{module}.CHUNK_BYTES", 2000)
    folder = models[0]["llama"]
    tasks = range(1, NUM_RANKS + (not is_running))
    adapters = {task: make_adapter(folder, seed=task) for task in tasks}
    size = sum(one.a.nbytes + one.b.nbytes for one in adapters[1])

    def drive(driver, sizes):
        broadcast = driver.engine._control.broadcast

        def look(payload):
            sizes.append(len(payload))
            broadcast(payload)

        monkeypatch.setattr(driver.engine._control, "broadcast", look)
        requests = [driver.submit(PROMPTS[0], max_tokens=95)] if is_running else []
        if is_running:
            driver.step()
        # Each of the other dp ranks gets one request.
        for task, one in adapters.items():
            given = {"adapter_id": task, "adapter": on_the_wire(one)}
            requests.append(driver.submit(PROMPTS[1], max_tokens=12, **given))
        driver.run()
        # A rank that runs alone gets an adapter at once.
        driver.engine._adapters.keep(9, on_the_wire(adapters[1]))
        requests.append(driver.submit(PROMPTS[1], max_tokens=2, adapter_id=9))
        driver.run()
        return [driver.outputs(request) for request in requests]

    sizes = []
    outputs = DataParallelRanks(world, folder, 1, 1, 1).drive(
        lambda driver: drive(driver, sizes)
    )

    if world.rank == 0:
        num_at_once = sum(each > 6000 for each in sizes)
        assert size < max(sizes) < size + 6000
        assert num_at_once == 1 or not is_running
        assert outputs == single(folder, lambda driver: drive(driver, []))


@pytest.mark.ranks(2)
def test_cancelled_requests_leave_nothing_in_any_dp_rank(world, models):
    def drive(driver):
        requests = [driver.submit(prompt, max_tokens=25) for prompt in PROMPTS * 2]
        for request in requests[:6]:
            driver.step()
            driver.engine.cancel("client", [request])
        driver.run()
        caches = [rank.cache for rank in driver.engine.scheduler.ranks]
        reasons = [driver.reasons[request, 0] for request in requests]
        return reasons, [cache.num_free for cache in caches], [c.num_blocks for c in caches]

    found = DataParallelRanks(world, models[0]["mixtral"], 1, 1, world.size).drive(drive)

    if world.rank == 0:
        reasons, free, blocks = found
        assert reasons == [FinishReason.CANCELLED] * 6 + [FinishReason.LENGTH] * 4
        assert free == blocks


@pytest.mark.ranks(4)
def test_dp_ranks_on_two_hosts_share_experts(two_host_world, models):
    folders, theirs = models
    dp_ranks = DataParallelRanks(two_host_world, folders["mixtral"], 1, 1, two_host_world.size)

    transports = dp_ranks.driver.engine.links.transports()
    outputs = dp_ranks.drive(lambda driver: driver.serve(PROMPTS))

    assert transports["expert_all_to_all"] == "gloo"
    if two_host_world.rank == 0:
        assert "tcp" in transports["results"]
        assert outputs == greedy(theirs["mixtral"])
