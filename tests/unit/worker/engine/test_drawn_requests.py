"""Many requests with random parameters at once: each gets what its parameters define."""

from __future__ import annotations

import random

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from tests.unit.worker import reference
from tests.unit.worker.conftest import VOCAB
from tests.unit.worker.lora_adapters import make_adapter, merged, on_the_wire

NUM_REQUESTS = 150
TASKS = (5, 9)


@pytest.fixture(scope="module")
def models(model_folder):
    """By LoRA task (0 without adapter): transformers' model, and the request's adapter
    fields."""
    adapters = {task: make_adapter(model_folder, seed=task) for task in TASKS}
    found = {
        task: (
            merged(model_folder, one).eval(),
            {"adapter_id": task, "adapter": on_the_wire(one)},
        )
        for task, one in adapters.items()
    }
    return {0: (LlamaForCausalLM.from_pretrained(model_folder).eval(), {}), **found}


def draw(rng):
    """A prompt and sampling parameters, any of which may be combined."""
    prefix = [rng.randrange(9)] * 16 if rng.random() < 0.5 else []
    prompt = prefix + [rng.randrange(VOCAB) for _ in range(rng.choice([1, 15, 16, 40]))]
    fields = {"max_tokens": rng.choice([1, 5, 12])}

    def maybe(chance, **values):
        if rng.random() < chance:
            fields.update(values)

    def words(most):
        return tuple(
            tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 2])))
            for _ in range(rng.randrange(1, most))
        )

    maybe(0.3, top_k=rng.choice([1, 2, 40, 149, 1024]))
    maybe(0.4, top_p=rng.choice([1e-6, 0.1, 0.9, 1.0]), top_p_min=rng.choice([1e-6, 0.3, 1.0]))
    maybe(0.2, min_p=rng.choice([0.01, 0.5, 1.0]))
    maybe(0.3, temperature=rng.choice([0.0, 0.5, 2.0, 100.0]), seed=rng.randrange(1 << 64))
    maybe(0.2, top_p_decay=rng.choice([0.3, 0.9]))
    maybe(0.2, repetition_penalty=rng.choice([0.5, 1.5, 100.0]))
    maybe(0.2, presence_penalty=rng.choice([-3.0, 0.3, 50.0]))
    maybe(0.2, frequency_penalty=rng.choice([-3.0, 0.3, 50.0]))
    maybe(0.2, no_repeat_ngram_size=rng.choice([1, 2, 3, 60]))
    maybe(0.5, end_id=rng.randrange(VOCAB), min_tokens=rng.choice([0, 1, 3, 40]))
    maybe(0.3, stop_words=words(20))
    maybe(0.3, bad_words=words(60))
    bias = np.random.default_rng(rng.randrange(99)).normal(0, 3, VOCAB)
    bias[rng.randrange(VOCAB)] = -np.inf
    maybe(0.2, embedding_bias=bias.astype("<f4").tobytes())
    maybe(0.3, return_log_probs=True)
    maybe(0.2, num_return_sequences=rng.randrange(2, 4))
    if rng.random() < 0.15:
        width = rng.randrange(2, 5)
        fields.update(beam_width=width, num_return_sequences=rng.randrange(1, width + 1))
        maybe(0.5, length_penalty=rng.choice([-1.0, 1.0]))
    return prompt, fields, rng.choice([0, 0, *TASKS])


def check_beams(driver, request, model, prompt, fields):
    """A search that is unambiguous in float32 finds the expected beams."""
    expected, margin = reference.beams(model, prompt, fields)
    if margin < 1e-3:
        return
    told = driver.extras[request, 0][-1]["beams"]
    assert driver.outputs(request) == [output for output, _ in expected]
    scores = [score for _, score in expected]
    assert told["scores"] == pytest.approx(scores, rel=1e-4, abs=5e-3)


def check_sequences(driver, request, model, prompt, fields):
    """Every sequence is possible for the request; log-probabilities are the model's."""
    for index in range(fields.get("num_return_sequences", 1)):
        output = driver.output(request, index)
        reference.check(model, prompt, fields, output, driver.reasons[request, index].name)
        if fields.get("return_log_probs"):
            rows = reference.logits_of(model, prompt, output)
            told = [x for extras in driver.extras[request, index] for x in extras["log_probs"]]
            own = [reference.log_softmax(rows[n])[x] for n, x in enumerate(output)]
            assert told == pytest.approx(own, abs=1e-3)


WAYS = {
    "plain": {},
    "overlapped, in chunks": {"depth": 2, "max_num_batched_tokens": 20},
    "paused": {"depth": 2, "max_tokens": 320, "tokens_per_block": 4},
    "reserved, without reuse": {"policy": "guaranteed_no_evict", "enable_block_reuse": False},
}


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize("way", WAYS)
def test_a_response_depends_on_its_request_alone(make_engine, models, way):
    rng = random.Random(way)
    driver = make_engine(max_beam_width=4, **WAYS[way])
    asked = [draw(rng) for _ in range(NUM_REQUESTS)]

    requests = []
    for prompt, fields, task in asked:
        requests.append(driver.submit(prompt, **fields, **models[task][1]))
        if rng.random() < 0.5:
            driver.step()
    driver.run(max_steps=100_000)

    for request, (prompt, fields, task) in zip(requests, asked, strict=True):
        check = check_beams if "beam_width" in fields else check_sequences
        check(driver, request, models[task][0], prompt, fields)
    driver.check_idle()
