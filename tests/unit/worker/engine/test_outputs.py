"""A request's outputs except ids: logits of prompt and output, and perf metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

VOCAB = 150
PROMPT = list(range(3, 40))


def _logits(driver, request_id, name, dtype=np.float32):
    """[tokens, vocabulary], all that arrived."""
    raw = [item for e in driver.extras[request_id, 0] for item in e.get(name, ())]
    return np.frombuffer(b"".join(raw), dtype).reshape(-1, VOCAB)


def _reference(model_folder, ids):
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.feature("output:context_logits", "output:generation_logits")
@pytest.mark.parametrize("tokens_a_step", [64, 10])
def test_logits_are_those_of_transformers(make_engine, model_folder, tokens_a_step):
    driver = make_engine(max_num_batched_tokens=tokens_a_step, max_num_seqs=8, depth=2)
    others = [driver.submit(PROMPT[:n], max_tokens=9) for n in (3, 20)]
    asked = driver.submit(
        PROMPT,
        max_tokens=6,
        return_context_logits=True,
        return_generation_logits=True,
        repetition_penalty=1.7,
        top_k=5,
        seed=3,
    )
    driver.run()

    output = driver.output(asked)
    expected = _reference(model_folder, PROMPT + output[:-1])
    context = _logits(driver, asked, "context_logits")
    generation = _logits(driver, asked, "generation_logits")
    np.testing.assert_allclose(context, expected[: len(PROMPT)], atol=2e-4)
    np.testing.assert_allclose(generation, expected[len(PROMPT) - 1 :], atol=2e-4)
    assert all((other, 0) not in driver.extras for other in others)
    driver.check_idle()


def test_logits_of_a_cached_prompt_are_complete_and_the_same(make_engine):
    driver = make_engine()
    values = {"max_tokens": 2, "return_context_logits": True}
    first = driver.submit(PROMPT, **values)
    driver.run()
    second = driver.submit(PROMPT, **values)
    driver.run()

    expected = _logits(driver, first, "context_logits")
    assert len(expected) == len(PROMPT)
    np.testing.assert_array_equal(_logits(driver, second, "context_logits"), expected)


def test_logits_come_as_float16_when_configured(make_engine):
    driver = make_engine()
    values = {"max_tokens": 3, "return_generation_logits": True}
    whole = driver.submit(PROMPT, **values)
    half = driver.submit(PROMPT, logits_dtype="float16", **values)
    driver.run()

    expected = _logits(driver, whole, "generation_logits").astype(np.float16)
    found = _logits(driver, half, "generation_logits", np.float16)
    np.testing.assert_array_equal(found, expected)


def test_a_preempted_request_returns_each_logit_once(make_engine):
    # Blocks for little more than one of two requests: one is preempted and resumes.
    driver = make_engine(max_tokens=96, expected_output_tokens=1, max_num_seqs=2)
    values = {
        "max_tokens": 30,
        "return_generation_logits": True,
        "return_context_logits": True,
    }
    asked = [driver.submit(PROMPT[shift : shift + 20], **values) for shift in (0, 5)]
    max_preempted = 0
    while driver.engine.has_work:
        driver.step()
        max_preempted = max(max_preempted, driver.engine.scheduler.preemptions.num_waiting)

    assert max_preempted == 1
    for request_id in asked:
        assert len(_logits(driver, request_id, "context_logits")) == 20
        logits = _logits(driver, request_id, "generation_logits")
        # Greedy: each token is the likeliest of its own logits.
        assert logits.argmax(axis=1).tolist() == driver.output(request_id)


def test_a_replayed_request_returns_only_undelivered_logits(make_engine):
    driver = make_engine()
    values = {
        "max_tokens": 8,
        "return_generation_logits": True,
        "return_context_logits": True,
        "return_log_probs": True,
    }
    whole = driver.submit(PROMPT, **values)
    driver.run()
    output = driver.output(whole)
    replayed = driver.submit(PROMPT, output=output[:3], **values)
    driver.run()

    assert driver.output(replayed) == output[3:]
    assert not any("context_logits" in extras for extras in driver.extras[replayed, 0])
    np.testing.assert_array_equal(
        _logits(driver, replayed, "generation_logits"),
        _logits(driver, whole, "generation_logits")[3:],
    )


@pytest.mark.feature(
    "output:kv_cache_alloc_new_blocks",
    "output:kv_cache_reused_blocks",
    "output:kv_cache_alloc_total_blocks",
    "output:arrival_time_ns",
    "output:first_scheduled_time_ns",
    "output:first_token_time_ns",
    "output:last_token_time_ns",
)
def test_perf_metrics_count_reused_blocks_and_times(make_engine):
    driver = make_engine(max_num_seqs=1)
    prompt = PROMPT[:33]
    first = driver.submit(prompt, max_tokens=4, return_perf_metrics=True)
    driver.run()
    second = driver.submit(prompt, max_tokens=4, return_perf_metrics=True)
    silent = driver.submit(prompt, max_tokens=4)
    driver.run()

    assert (silent, 0) not in driver.extras
    cold, warm = driver.extras[first, 0][-1], driver.extras[second, 0][-1]
    assert cold["figures"]["kv_cache_alloc_new_blocks"] == 3
    assert cold["figures"]["kv_cache_reused_blocks"] == 0
    assert warm["figures"]["kv_cache_alloc_new_blocks"] == 1
    assert warm["figures"]["kv_cache_reused_blocks"] == 2
    # The two whole blocks and the ids behind them are kept: the last block is written on in.
    third = driver.submit([*prompt, 7, 8], max_tokens=1, return_perf_metrics=True)
    driver.run()
    longer = driver.extras[third, 0][-1]["figures"]
    assert (longer["kv_cache_alloc_new_blocks"], longer["kv_cache_reused_blocks"]) == (1, 2)
    for extras in (cold, warm):
        times = [
            extras["figures"][f"{name}_time_ns"]
            for name in ("arrival", "first_scheduled", "first_token", "last_token")
        ]
        assert times == sorted(times) and times[0] > 0
