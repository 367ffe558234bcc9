"""A request's tokens do not depend on how the engine schedules its steps."""

import random

import pytest
import torch
from transformers import LlamaForCausalLM

from trimaran.comm.messages.messages import FinishReason

SEEDED = {"top_p": 0.95, "seed": 11, "temperature": 1.5}
GREEDY: dict = {}
LENGTHS = (1, 15, 16, 17, 40, 100)


@pytest.fixture
def expected(make_engine, prompt_of):
    """Outputs of prompts computed whole and alone, by sampling and prompt length."""
    outputs = {}
    for sampling in (GREEDY, SEEDED):
        for length in LENGTHS:
            driver = make_engine(max_num_batched_tokens=256)
            request = driver.submit(prompt_of(length, length), max_tokens=20, **sampling)
            driver.run()
            outputs[bool(sampling), length] = driver.output(request)
    return outputs


def test_greedy_tokens_are_those_of_transformers(model_folder, expected, prompt_of):
    reference = LlamaForCausalLM.from_pretrained(model_folder).eval()
    for length in LENGTHS:
        prompt = torch.tensor([prompt_of(length, length)])
        with torch.inference_mode():
            ids = reference.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=20,
                do_sample=False,
                pad_token_id=0,
            )
        assert ids[0, length:].tolist() == expected[False, length]


def submit_all(driver, prompt_of, **fields):
    return {
        (bool(sampling), length): driver.submit(
            prompt_of(length, length), max_tokens=20, **sampling, **fields
        )
        for length in LENGTHS
        for sampling in (GREEDY, SEEDED)
    }


CASES = {
    "together": {},
    "overlapped": {"depth": 2},
    "in chunks of a block": {"max_num_batched_tokens": 16},
    "in chunks of no block": {"max_num_batched_tokens": 23, "depth": 2},
    "without reuse": {"enable_block_reuse": False},
    "few rows": {"max_num_seqs": 2, "depth": 2},
    "preempted": {"max_tokens": 208, "depth": 1},
    "preempted, overlapped": {"max_tokens": 208, "depth": 2},
    "offloaded": {"max_tokens": 208, "host_bytes": 1 << 20, "depth": 2},
    "reserved": {"policy": "guaranteed_no_evict", "max_tokens": 208, "depth": 2},
    "static": {"policy": "static_batch", "max_tokens": 208},
    "V1": {"batching": "V1", "depth": 2},
    "prompts whole": {"enable_chunked_context": False, "max_num_batched_tokens": 110},
    "blocks of 32": {"tokens_per_block": 32},
    "blocks of 5": {"tokens_per_block": 5, "depth": 2},
}


@pytest.mark.matrix(keep=8)
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_tokens_do_not_depend_on_the_batching_of_steps(
    make_engine, prompt_of, expected, changes
):
    driver = make_engine(**changes)
    requests = submit_all(driver, prompt_of)

    driver.run()

    assert {key: driver.output(request) for key, request in requests.items()} == expected
    assert set(driver.reasons.values()) == {FinishReason.LENGTH}
    driver.check_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_hit_changes_no_token(make_engine, prompt_of, expected, depth):
    driver = make_engine(depth=depth)
    submit_all(driver, prompt_of)
    driver.run()
    reused_before = driver.engine.stats()["kv_reused_blocks"]

    requests = submit_all(driver, prompt_of)
    driver.run()

    assert {key: driver.output(request) for key, request in requests.items()} == expected
    # Whole blocks of 16, 17, 40 and 100 tokens, for two requests each, except that one request
    # takes over the block of the first 16. The count includes the partial blocks at the ends of
    # 15, 40 and 100 tokens.
    num_whole, num_ends = 2 * (1 + 1 + 2 + 6) - 1, 2 * 3
    reused = driver.engine.stats()["kv_reused_blocks"] - reused_before
    assert reused == num_whole + num_ends
    driver.check_idle()


@pytest.mark.parametrize("num_done", [1, 7, 19])
def test_a_replayed_request_continues_after_its_delivered_tokens(
    make_engine, prompt_of, expected, num_done
):
    driver = make_engine(depth=2)
    requests = {}
    for (is_seeded, length), whole in expected.items():
        requests[is_seeded, length] = driver.submit(
            prompt_of(length, length),
            output=whole[:num_done],
            max_tokens=20,
            **(SEEDED if is_seeded else GREEDY),
        )

    driver.run()

    for key, request in requests.items():
        assert driver.output(request) == expected[key][num_done:]
    driver.check_idle()


def test_the_small_cache_of_these_tests_causes_preemption(make_engine, prompt_of):
    driver = make_engine(max_tokens=208, depth=2)
    submit_all(driver, prompt_of)
    most = 0
    while driver.engine.has_work:
        driver.step()
        most = max(most, driver.engine.scheduler.preemptions.num_waiting)

    assert most > 0


@pytest.mark.parametrize("seed", range(4))
def test_tokens_survive_any_history(make_engine, prompt_of, seed):
    """Random arrivals, cancellations, priorities and replays on a cache that is too small."""
    rng = random.Random(seed)
    reference = make_engine(max_num_batched_tokens=256, enable_block_reuse=False)
    driver = make_engine(
        depth=rng.choice((1, 2)),
        max_tokens=rng.choice((176, 256)),
        max_num_batched_tokens=rng.choice((20, 48)),
        max_num_seqs=rng.choice((3, 8)),
        policy=rng.choice(("max_utilization", "max_utilization", "guaranteed_no_evict")),
    )
    expected, cancelled = {}, set()
    for number in range(40):
        prompt = prompt_of(rng.randrange(1, 90), rng.randrange(12))
        fields = rng.choice(
            (GREEDY, SEEDED, {"top_k": 30, "seed": number}, {"repetition_penalty": 1.3})
        )
        num_done = rng.choice((0, 0, 3))
        alone = reference.submit(prompt, max_tokens=12, **fields)
        reference.run(max_steps=10_000)
        whole = reference.output(alone)
        request = driver.submit(
            prompt,
            output=whole[:num_done],
            max_tokens=12,
            priority=rng.choice((0, 0, 2)),
            **fields,
        )
        expected[request] = whole[num_done:]
        for _ in range(rng.randrange(6)):
            if driver.engine.has_work:
                driver.step()
        if rng.random() < 0.2:
            unlucky = rng.choice(list(expected))
            cancelled.add(unlucky)
            driver.engine.cancel("client", [unlucky])
        scheduler = driver.engine.scheduler
        held = (*scheduler.running, *scheduler.waiting, *scheduler.deferred_frees)
        scheduler.cache.check([sequence.blocks for sequence in held])
    driver.run(max_steps=10_000)

    for request, tokens in expected.items():
        if driver.reasons[request, 0] == FinishReason.CANCELLED:
            assert request in cancelled
            assert driver.output(request) == tokens[: len(driver.output(request))]
        else:
            assert driver.output(request) == tokens
    driver.check_idle()
