"""An engine over several ranks gives the tokens of one rank, and all ranks sample alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trimaran.comm import mpi
from trimaran.comm.collectives import SingleRankGroup, connect_group
from trimaran.comm.control import LocalControlPlane, connect_control
from trimaran.comm.messages import StepOutput, Submit, pack_ids
from trimaran.comm.sampling_params import SamplingParams
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.candidates import argmax_over_shards
from trimaran.worker.config import CacheConfig, EngineConfig, RankConfig, SchedulerConfig
from trimaran.worker.engine import Engine
from trimaran.worker.prompt_tables import PromptTable

VOCAB = 150
HAS_GPUS = torch.cuda.device_count() >= mpi.MPI.COMM_WORLD.Get_size()
DEVICE = "cuda" if HAS_GPUS else "cpu"
"""A GPU for each rank where the host has as many; float32 gives the same tokens."""
PROMPTS = [
    np.random.default_rng(length).integers(0, VOCAB, length) for length in (1, 16, 40, 70)
]
SAMPLINGS = (
    {},
    {"top_k": 20, "seed": 3},
    {"top_p": 0.9, "seed": 4, "min_tokens": 3},
    {"beam_width": 2, "num_return_sequences": 2, "repetition_penalty": 1.3},
)


@pytest.fixture(scope="module")
def folder(world, tmp_path_factory):
    """A Hugging Face folder that rank 0 writes for all."""
    path = str(tmp_path_factory.mktemp("model")) if world.rank == 0 else ""
    if world.rank == 0:
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=70,
            # Neither 2 nor 4 divide the heads, and 4 not the width.
            intermediate_size=98,
            num_hidden_layers=2,
            num_attention_heads=10,
            num_key_value_heads=5,
            head_dim=8,
            max_position_embeddings=128,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
        )
        LlamaForCausalLM(config).save_pretrained(path)
    return world.comm.bcast(path)


def make_engine(folder, layout, control, group, depth, **cache):
    config = EngineConfig(
        model="test",
        engine_dir=folder,
        device=DEVICE,
        dtype="float32",
        scheduler=SchedulerConfig(
            max_num_batched_tokens=48,
            max_num_seqs=8,
            max_seq_len=100,
            max_input_len=99,
            max_beam_width=2,
            policy="max_utilization",
            depth=depth,
        ),
        cache=CacheConfig(**{"tokens_per_block": 16, "max_tokens": 256, **cache}),
    )
    engine = Engine(RankConfig(engine=config, group="test"), layout, control, group)
    engine.load()
    return engine


def serve(engine):
    """Outputs of all prompts under all samplings, by request id."""
    count = 0
    for prompt in PROMPTS:
        for sampling in SAMPLINGS:
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


@pytest.mark.parametrize("depth", [1, 2])
def test_all_ranks_together_give_the_tokens_of_one(world, folder, depth):
    rank_device = torch.device("cuda", world.rank) if HAS_GPUS else torch.device("cpu")
    group = connect_group(world, rank_device, 20.0)
    control = connect_control(world, 20.0)
    layout = ParallelLayout(rank=world.rank, tp_size=world.size, hosts=world.hosts)
    engine = make_engine(folder, layout, control, group, depth)
    if world.rank == 0:
        outputs = serve(engine)
        control.close()
        single = make_engine(
            folder, ParallelLayout(), LocalControlPlane(), SingleRankGroup(), 1
        )
        assert outputs == serve(single)
        assert {len(ids) for ids in outputs.values()} == {12, 2}
    else:
        while (payload := control.receive()) is not None:
            engine.follow(payload)
    world.barrier(30.0, "all served")

    tables = world.comm.gather(engine.runner.inputs.token_table.cpu())

    if world.rank == 0:
        assert all(torch.equal(table, tables[0]) for table in tables)
    group.close()


def test_all_ranks_keep_evicted_blocks_and_see_windows_alike(world, folder):
    rank_device = torch.device("cuda", world.rank) if HAS_GPUS else torch.device("cpu")
    group = connect_group(world, rank_device, 20.0)
    control = connect_control(world, 20.0)
    layout = ParallelLayout(rank=world.rank, tp_size=world.size, hosts=world.hosts)
    windows = {"attention_windows": (50, 1000), "num_sinks": 2}
    small = {"max_tokens": 160, "host_bytes": 1 << 20, **windows}
    engine = make_engine(folder, layout, control, group, 2, **small)
    if world.rank == 0:
        outputs = [serve(engine) for _ in range(3)]
        control.close()
        assert engine.scheduler.cache.hosts[0].num_loaded > 0
        local = (ParallelLayout(), LocalControlPlane(), SingleRankGroup())
        assert outputs == [serve(make_engine(folder, *local, 1, **windows))] * 3
    else:
        while (payload := control.receive()) is not None:
            engine.follow(payload)
    world.barrier(30.0, "all served")
    engine.shutdown()
    group.close()


def tell(engine):
    """Ids, and logits of prompt and output, of a request with vectors of its own."""
    table = np.random.default_rng(0).normal(0, 0.3, (3, 70)).astype(np.float32)
    wants = {"return_context_logits": True, "return_generation_logits": True}
    submit = Submit(
        request_id=7,
        model="m",
        prompt_ids=pack_ids([5, VOCAB + 2, VOCAB, *range(60), VOCAB + 1]),
        sampling=SamplingParams(max_tokens=5, **wants).to_wire(),
        embeddings=PromptTable("FP32", table.shape, table.tobytes()).to_wire(),
    )
    engine.submit(0, submit)
    told = {"ids": [], "context_logits": [], "generation_logits": []}
    while engine.has_work:
        for _, message in engine.step().messages:
            told["ids"] += np.frombuffer(message.token_ids, dtype=np.int32).tolist()
            for name in ("context_logits", "generation_logits"):
                told[name] += message.extras[0].get(name, ())
    logits = [
        np.frombuffer(b"".join(told[name]), np.float32).reshape(-1, VOCAB)
        for name in ("context_logits", "generation_logits")
    ]
    return told["ids"], *logits


def test_logits_and_prompt_tables_are_whole_over_ranks(world, folder):
    rank_device = torch.device("cuda", world.rank) if HAS_GPUS else torch.device("cpu")
    group = connect_group(world, rank_device, 20.0)
    control = connect_control(world, 20.0)
    layout = ParallelLayout(rank=world.rank, tp_size=world.size, hosts=world.hosts)
    engine = make_engine(folder, layout, control, group, 2)
    if world.rank == 0:
        ids, context, generation = tell(engine)
        control.close()
        single = make_engine(
            folder, ParallelLayout(), LocalControlPlane(), SingleRankGroup(), 1
        )
        expected_ids, expected_context, expected_generation = tell(single)
        assert ids == expected_ids
        assert context.shape == (64, VOCAB) and generation.shape == (5, VOCAB)
        np.testing.assert_allclose(context, expected_context, atol=1e-4)
        np.testing.assert_allclose(generation, expected_generation, atol=1e-4)
    else:
        while (payload := control.receive()) is not None:
            engine.follow(payload)
    world.barrier(30.0, "all served")
    group.close()


def test_the_argmax_over_shards_is_the_first_of_the_likeliest_ids(world):
    group = connect_group(world, torch.device("cpu"), 20.0)
    torch.manual_seed(0)
    # Few values, so that most rows have their largest on several ranks; the last has none.
    width = 37
    whole = torch.randint(0, 5, (50, width * (world.size - 1))).float()
    mine = whole[:, world.rank * width : (world.rank + 1) * width]

    ids = argmax_over_shards(mine, world.rank * width, group)

    assert torch.equal(ids, whole.argmax(dim=1))
    group.close()
