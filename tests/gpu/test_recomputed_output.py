"""Output that is computed again, or is in a prompt, in deterministic mode on a GPU.

Kernels of prompts and of decodes round differently. A sequence that resumes after a preemption
or a restart therefore computes its output as decodes, and prompts share no keys and values with
outputs. Log-probabilities show a difference of roundings long before an id does.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.driver import Driver
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from trimaran.worker.config.speculation_config import SpeculationConfig

pytestmark = pytest.mark.gpu

VOCAB, NUM_TOKENS = 1000, 150
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "initializer_range": 0.05, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MODELS = {
    "heads of 64": (LlamaForCausalLM, LlamaConfig(**SIZES, head_dim=64)),
    "heads of 128": (LlamaForCausalLM, LlamaConfig(**SIZES, head_dim=128)),
    "experts": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **SIZES, head_dim=64, num_experts=16, num_experts_per_tok=4,
            moe_intermediate_size=128,
        ),
    ),
}  # fmt: skip
PROMPTS = [
    np.random.default_rng(number).integers(0, VOCAB, length).tolist()
    for number, length in enumerate((1, 31, 32, 33, 200, 90, 64, 5, 150, 17, 40, 100))
]
NGRAM = SpeculationConfig(drafter="ngram", is_adaptive=False)


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    kind, config = MODELS[request.param]
    kind(config).save_pretrained(path)
    return str(path)


def make_driver(folder, max_tokens, *, reuses=True, host_bytes=0, **limits):
    values = {"max_num_batched_tokens": 512, "max_num_seqs": 12, "depth": 2, **limits}
    return Driver(
        EngineConfig(
            model="test", engine_dir=folder, device="cuda", dtype="bfloat16",
            deterministic=True,
            scheduler=SchedulerConfig(
                max_seq_len=512, max_input_len=500, policy="max_utilization",
                expected_output_tokens=1, **values,
            ),
            cache=CacheConfig(
                tokens_per_block=16, max_tokens=max_tokens, enable_block_reuse=reuses,
                host_bytes=host_bytes,
            ),
        )
    )  # fmt: skip


def serve(driver, prompts=PROMPTS, outputs=None, num_tokens=NUM_TOKENS):
    """Ids and log-probabilities of each prompt's greedy output, behind ``outputs`` that
    clients have; all are submitted at once."""
    requests = [
        driver.submit(
            prompt, output=() if outputs is None else outputs[number], max_tokens=num_tokens,
            top_k=1, return_log_probs=True,
        )
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip
    driver.run(max_steps=100_000)
    return [(driver.output(each), driver.told(each, "log_probs")) for each in requests]


@pytest.fixture(scope="module")
def expected(folder):
    """The results of sequences that all have room at once."""
    driver = make_driver(folder, 8192)
    found = serve(driver)
    assert driver.engine.scheduler.preemptions.num_sequences == 0
    driver.engine.shutdown()
    return found


def assert_same(found, expected):
    """The same ids from the same logits; sums over the vocabulary may be split differently."""
    for (ids, log_probs), (known_ids, known) in zip(found, expected, strict=True):
        assert ids == known_ids
        np.testing.assert_allclose(log_probs, known, atol=1e-5, rtol=0)


WAYS = {
    "reuse": {},
    "no reuse": {"reuses": False},
    "a host cache": {"host_bytes": 1 << 24},
    "few rows": {"max_num_batched_tokens": 24},
    "drafts": {"speculation": NGRAM},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_preempted_sequence_has_the_log_probabilities_of_one_that_was_not(
    folder, expected, way
):
    driver = make_driver(folder, 1280, **WAYS[way])

    found = serve(driver)

    assert driver.engine.scheduler.preemptions.num_sequences > 0
    driver.engine.shutdown()
    assert_same(found, expected)


@pytest.mark.parametrize("num_known", [1, 2, 17, 149])
def test_a_replayed_sequence_has_the_log_probabilities_of_one_that_was_not(
    folder, expected, num_known
):
    driver = make_driver(folder, 8192, reuses=False)

    found = serve(driver, outputs=[ids[:num_known] for ids, _ in expected])

    driver.engine.shutdown()
    rest = [(ids[num_known:], log_probs[num_known:]) for ids, log_probs in expected]
    assert_same(found, rest)


def test_a_prompt_with_an_output_has_the_log_probabilities_of_one_without_a_cache(
    folder, expected
):
    longer = [
        [*prompt, *ids[: 40 + number], 7]
        for number, (prompt, (ids, _)) in enumerate(zip(PROMPTS, expected, strict=True))
    ]
    alone = make_driver(folder, 8192, reuses=False)
    plain = serve(alone, longer, num_tokens=20)
    alone.engine.shutdown()
    driver = make_driver(folder, 8192)
    serve(driver)

    found = serve(driver, longer, num_tokens=20)

    num_reused = driver.engine.scheduler.cache.num_reused_blocks
    driver.engine.shutdown()
    assert num_reused > len(PROMPTS)
    assert_same(found, plain)
