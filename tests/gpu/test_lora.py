"""Adapters on a GPU: the kernels against their twin, engines against merged weights."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.driver import Driver
from tests.gpu.test_logits import expected_log_probs
from tests.unit.worker.lora_adapters import make_adapter, merged, on_the_wire
from trimaran.kernels import adapters
from trimaran.kernels.adapters import AdapterBlocks, AdapterTables
from trimaran.kernels.triton import lora as triton_lora
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    LoraConfig,
    SchedulerConfig,
)
from trimaran.worker.lora.token_slots import token_blocks

pytestmark = pytest.mark.gpu

VOCAB, NUM_TOKENS, TOLERANCE = 1000, 16, 0.2
RANKS = (8, 64, 16, 1)


def random_tables(width, rows):
    """An adapter of each rank, for all targets of one product."""
    offsets, size = torch.zeros(len(RANKS), len(rows), 3, dtype=torch.int64), 0
    for slot, rank in enumerate(RANKS):
        for part, count in enumerate(rows):
            offsets[slot, part] = torch.tensor([rank, size, size + rank * width])
            size += rank * (width + count)
    data = torch.randn(size, device="cuda").bfloat16() / 32
    return AdapterTables(data, offsets.cuda())


@pytest.mark.parametrize(("width", "rows"), [(4096, (4096, 1024, 1024)), (14336, (4096,))])
@pytest.mark.parametrize(("tokens", "block_size"), [(7, 16), (256, 16), (1500, 64)])
def test_sums_are_those_of_the_plain_twin(width, rows, tokens, block_size):
    torch.manual_seed(tokens)
    tables = random_tables(width, rows)
    slots = np.random.default_rng(0).integers(-1, len(RANKS), tokens).astype(np.int32)
    offsets, block_slots = token_blocks(slots, block_size)
    on_device = (torch.from_numpy(array).cuda() for array in (offsets, block_slots))
    blocks = AdapterBlocks(*on_device, max(RANKS))
    x = torch.randn(tokens, width, device="cuda").bfloat16() / 8
    output = torch.randn(tokens, sum(rows), device="cuda").bfloat16()
    expected = output.clone()
    adapters.add_adapters(x, expected, tables, blocks, 0, rows)
    assert (expected != output).any()

    triton_lora.add_adapters(x, output, tables, blocks, 0, rows)

    torch.testing.assert_close(output, expected, atol=0.03, rtol=0.02)
    assert torch.equal(output[slots < 0], expected[slots < 0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def make_engine(folder, **changes):
    return Driver(
        EngineConfig(
            model="test",
            engine_dir=folder,
            device="cuda",
            dtype="bfloat16",
            scheduler=SchedulerConfig(
                max_num_seqs=16, max_seq_len=1024, max_input_len=1000,
                max_num_batched_tokens=2048,
            ),
            cache=CacheConfig(free_memory_fraction=0.3),
            **changes,
        )
    )  # fmt: skip


def small_adapter(folder, seed, rank):
    """Adapters of a magnitude that changes tokens and keeps logits in the model's usual
    range."""
    return [
        dataclasses.replace(one, a=one.a / 4, b=one.b / 4)
        for one in make_adapter(folder, seed, rank)
    ]


@pytest.mark.parametrize(
    "changes", [{}, {"deterministic": True}, {"lora": LoraConfig(has_graphs=True)}], ids=str
)
def test_requests_of_a_mixed_batch_have_the_log_probs_of_their_merged_weights(folder, changes):
    given = {task: small_adapter(folder, task, rank) for task, rank in ((5, 8), (9, 64))}
    references = {task: merged(folder, adapter).cuda() for task, adapter in given.items()}
    references[0] = merged(folder, []).cuda()
    driver = make_engine(folder, **changes)
    asked = [
        (np.random.default_rng(length).integers(0, VOCAB, length), task)
        for length in (3, 40, 200, 700)
        for task in (0, 5, 9)
    ]

    requests = []
    for prompt, task in asked:
        adapter = on_the_wire(given[task]) if task else None
        requests.append(
            driver.submit(
                prompt.tolist(), max_tokens=NUM_TOKENS, return_log_probs=True,
                adapter_id=task, adapter=adapter,
            )
        )  # fmt: skip
    driver.run()

    outputs = [driver.output(request) for request in requests]
    assert all(one != other for one, other in pairwise(outputs))
    for (prompt, task), request, output in zip(asked, requests, outputs, strict=True):
        found = [p for extra in driver.extras[request, 0] for p in extra["log_probs"]]
        expected = expected_log_probs(references[task], prompt, output)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)
    driver.engine.shutdown()


def test_adapters_change_no_other_request_of_a_deterministic_engine(folder):
    adapter = on_the_wire(small_adapter(folder, 5, 8))
    prompts = [np.random.default_rng(n).integers(0, VOCAB, 50 * n).tolist() for n in (1, 2, 3)]
    outputs = []
    for task in (0, 5):
        driver = make_engine(folder, deterministic=True)
        requests = [driver.submit(prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
        driver.submit(
            prompts[0], max_tokens=NUM_TOKENS, adapter_id=task,
            adapter=adapter if task else None,
        )  # fmt: skip
        driver.run()
        outputs.append([driver.output(request) for request in requests])
        driver.engine.shutdown()

    assert outputs[0] == outputs[1]
