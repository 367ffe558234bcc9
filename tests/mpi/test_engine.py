"""An engine over several ranks gives the tokens of one rank, and all ranks sample alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.driver import Driver, Ranks
from trimaran.comm import mpi
from trimaran.comm.collectives.connect import connect_group
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
)
from trimaran.worker.execution.prompt_tables import PromptTable
from trimaran.worker.sampling.candidates import argmax_over_shards

VOCAB = 150
HAS_GPUS = torch.cuda.device_count() >= mpi.MPI.COMM_WORLD.Get_size()
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


def engine_config(folder, depth, **cache):
    return EngineConfig(
        model="test",
        engine_dir=folder,
        device="cuda" if HAS_GPUS else "cpu",
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


@pytest.fixture
def ranks(world):
    """All ranks as one tensor group."""
    device = torch.device("cuda", world.rank) if HAS_GPUS else None
    return Ranks(world, ParallelConfig(tp_size=world.size), device)


def serve(driver):
    return driver.serve(PROMPTS, SAMPLINGS)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("depth", [1, 2])
def test_all_ranks_together_give_the_tokens_of_one_rank(world, ranks, folder, depth):
    driver = Driver(engine_config(folder, depth), ties=ranks.ties)

    outputs = ranks.run(driver, serve)

    if world.rank == 0:
        assert outputs == serve(Driver(engine_config(folder, 1)))
        assert {len(ids) for sequences in outputs for ids in sequences} == {12}
    tables = world.comm.gather(driver.engine.runner.inputs.token_table.cpu())
    if world.rank == 0:
        assert all(torch.equal(table, tables[0]) for table in tables)


@pytest.mark.ranks(2)
def test_evicted_blocks_and_windows_are_the_same_on_all_ranks(world, ranks, folder):
    windows = {"attention_windows": (50, 1000), "num_sinks": 2}
    small = {"max_tokens": 160, "host_bytes": 1 << 20, **windows}
    driver = Driver(engine_config(folder, 2, **small), ties=ranks.ties)

    outputs = ranks.run(driver, lambda driver: [serve(driver) for _ in range(3)])

    if world.rank == 0:
        assert driver.engine.scheduler.cache.hosts[0].num_loaded > 0
        assert outputs == [serve(Driver(engine_config(folder, 1, **windows)))] * 3


def tell(driver):
    """Ids, and logits of prompt and output, of a request with vectors of its own."""
    table = np.random.default_rng(0).normal(0, 0.3, (3, 70)).astype(np.float32)
    request = driver.submit(
        [5, VOCAB + 2, VOCAB, *range(60), VOCAB + 1],
        max_tokens=5,
        return_context_logits=True,
        return_generation_logits=True,
        embeddings=PromptTable("FP32", table.shape, table.tobytes()).to_wire(),
    )
    driver.run()
    logits = [
        np.frombuffer(b"".join(driver.told(request, name)), np.float32).reshape(-1, VOCAB)
        for name in ("context_logits", "generation_logits")
    ]
    return driver.output(request), *logits


@pytest.mark.ranks(2)
def test_logits_and_prompt_tables_are_whole_over_ranks(world, ranks, folder):
    told = ranks.run(Driver(engine_config(folder, 2), ties=ranks.ties), tell)

    if world.rank == 0:
        ids, context, generation = told
        expected_ids, *expected = tell(Driver(engine_config(folder, 1)))
        assert ids == expected_ids
        assert context.shape == (64, VOCAB) and generation.shape == (5, VOCAB)
        np.testing.assert_allclose(context, expected[0], atol=1e-4)
        np.testing.assert_allclose(generation, expected[1], atol=1e-4)


def test_the_argmax_over_shards_is_the_first_of_the_likeliest_ids(world):
    group = connect_group(world, torch.device("cpu"), 20.0)
    torch.manual_seed(0)
    # Few values, so that most rows have their largest value on several ranks; the last rank has
    # no value.
    width = 37
    whole = torch.randint(0, 5, (50, width * (world.size - 1))).float()
    mine = whole[:, world.rank * width : (world.rank + 1) * width]

    ids = argmax_over_shards(mine, world.rank * width, group)

    assert torch.equal(ids, whole.argmax(dim=1))
    group.close()
