"""Outputs with draft tokens are those without, whatever the drafts are."""

from __future__ import annotations

import random

import numpy as np
import pytest
from transformers import LlamaConfig

from tests.unit.worker.conftest import VOCAB
from tests.unit.worker.engine import test_every_feature
from tests.unit.worker.speculation.head_reference import random_medusa
from tests.unit.worker.speculation.many_prompts import DRAFTERS
from trimaran.worker.config.speculation_config import SpeculationConfig

ASKED = SpeculationConfig(drafter="draft_tokens", max_draft_tokens=6)
NGRAM = SpeculationConfig(drafter="ngram", max_draft_tokens=5, is_adaptive=False)
LOOKAHEAD = SpeculationConfig(
    drafter="lookahead", lookahead=(5, 3, 4), max_draft_tokens=5, is_adaptive=False
)

WAYS = {
    "together": {},
    "overlapped, in chunks": {"depth": 2, "max_num_batched_tokens": 40},
    "paused": {"max_tokens": 320, "tokens_per_block": 4},
    "paused, overlapped": {"max_tokens": 320, "tokens_per_block": 4, "depth": 2},
    "reserved, without reuse": {"policy": "guaranteed_no_evict", "enable_block_reuse": False},
    "few rows": {"max_num_seqs": 3},
    "blocks of 5, overlapped": {"tokens_per_block": 5, "depth": 2},
    "static": {"policy": "static_batch"},
    "a window": {
        "policy": "guaranteed_no_evict", "enable_block_reuse": False, "tokens_per_block": 4,
        "attention_windows": (20,), "depth": 2,
    },
    "offloaded": {"max_tokens": 320, "tokens_per_block": 4, "host_bytes": 1 << 20},
}  # fmt: skip


def draw(rng):
    """A prompt that repeats itself, and sampling parameters that may be combined."""
    words = [rng.randrange(VOCAB) for _ in range(4)]
    prompt = [rng.choice(words) for _ in range(rng.choice([1, 15, 16, 40]))]
    fields = {"max_tokens": rng.choice([1, 2, 12, 24])}

    def maybe(chance, **values):
        if rng.random() < chance:
            fields.update(values)

    def some(most):
        return tuple(
            tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 2])))
            for _ in range(rng.randrange(1, most))
        )

    maybe(0.3, top_k=rng.choice([2, 40]), seed=rng.randrange(1 << 64))
    maybe(0.3, top_p=rng.choice([0.3, 0.9]), top_p_decay=rng.choice([0.5, 1.0]))
    maybe(0.2, repetition_penalty=rng.choice([0.5, 1.5]))
    maybe(0.2, presence_penalty=0.5, frequency_penalty=rng.choice([-1.0, 0.3]))
    maybe(0.2, no_repeat_ngram_size=rng.choice([1, 2, 3]))
    maybe(0.4, end_id=rng.randrange(VOCAB), min_tokens=rng.choice([0, 3]))
    maybe(0.3, stop_words=some(30))
    maybe(0.3, bad_words=some(60))
    bias = np.random.default_rng(rng.randrange(99)).normal(0, 2, VOCAB)
    maybe(0.2, embedding_bias=bias.astype("<f4").tobytes())
    maybe(0.4, return_log_probs=True)
    maybe(0.1, return_generation_logits=True)
    maybe(0.1, num_return_sequences=2)
    maybe(0.05, beam_width=3)
    return prompt, fields


def serve(driver, asked, drafts=None):
    """What each request's client gets: ids, reason, and log-probabilities."""
    requests = []
    for number, (prompt, fields) in enumerate(asked):
        own = {} if drafts is None else {"draft_token_ids": drafts[number]}
        requests.append(driver.submit(prompt, **fields, **own))
        driver.step()
    driver.run(max_steps=100_000)
    driver.check_idle()
    return [
        (
            driver.outputs(request),
            [driver.reasons[key] for key in sorted(driver.reasons) if key[0] == request],
            driver.told(request, "log_probs"),
            [bytes(each) for each in driver.told(request, "generation_logits")],
        )
        for request in requests
    ]


def check(told, expected):
    """Ids and reasons are equal; so are log-probabilities, but for rounding."""
    for (ids, reasons, log_probs, logits), own in zip(told, expected, strict=True):
        assert ids == own[0]
        assert reasons == own[1]
        assert log_probs == pytest.approx(own[2], abs=1e-3)
        assert len(logits) == len(own[3])


def corrupt(rng, kind, output):
    """Drafts that are all right, all wrong, right up to a place, or too long."""
    output = output or [0]
    if kind == "right":
        return tuple(output[:6])
    if kind == "wrong":
        return tuple((each + 1) % VOCAB for each in output[:6])
    if kind == "mixed":
        place = rng.randrange(6)
        return tuple((each + (n == place)) % VOCAB for n, each in enumerate(output[:6]))
    return tuple((output + [rng.randrange(VOCAB) for _ in range(6)])[:6])


@pytest.mark.matrix(keep=4)
@pytest.mark.parametrize("way", WAYS)
def test_drafts_of_requests_change_no_output(make_engine, way):
    rng = random.Random(way)
    asked = [draw(rng) for _ in range(80)]
    expected = serve(make_engine(max_beam_width=3, **WAYS[way]), asked)
    outputs = [ids[0] if ids else [] for ids, *_ in expected]

    driver = make_engine(max_beam_width=3, speculation=ASKED, **WAYS[way])
    kinds = ["right", "wrong", "mixed", "beyond"]
    drafts = [corrupt(rng, rng.choice(kinds), output) for output in outputs]
    drafts = [() if "beam_width" in f else d for d, (_, f) in zip(drafts, asked, strict=True)]
    check(serve(driver, asked, drafts), expected)

    counts = driver.engine.scheduler.draft_counts
    assert 0 < counts.num_accepted < counts.num_tokens


@pytest.mark.matrix(keep=6)
@pytest.mark.parametrize("drafts", [NGRAM, LOOKAHEAD], ids=["ngram", "lookahead"])
@pytest.mark.parametrize("way", WAYS)
def test_drafts_of_the_text_change_no_output(make_engine, way, drafts):
    rng = random.Random(way)
    asked = [draw(rng) for _ in range(80)]
    expected = serve(make_engine(max_beam_width=3, **WAYS[way]), asked)

    driver = make_engine(max_beam_width=3, speculation=drafts, **WAYS[way])
    check(serve(driver, asked), expected)

    counts = driver.engine.scheduler.draft_counts
    assert 0 < counts.num_accepted < counts.num_tokens


@pytest.mark.timeout(1200)
@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("num_requests", [60, 1000])
@pytest.mark.parametrize("drafter", ["ngram", "lookahead", "eagle", "draft_model", "medusa"])
def test_drafts_beside_every_other_feature_change_no_output(drafter, num_requests, tmp_path):
    own = DRAFTERS.get(drafter)
    if own is None:
        config = LlamaConfig.from_pretrained(test_every_feature.MODEL)
        folder = random_medusa(tmp_path, config, num_heads=3)
        own = SpeculationConfig(
            drafter=drafter, draft_dir=str(folder), max_draft_tokens=3, is_adaptive=False
        )
    rng = random.Random(8)
    adapters = test_every_feature.make_adapters()
    asked = [test_every_feature.draw(rng, adapters) for _ in range(num_requests)]
    for fields in asked:
        fields["max_tokens"] *= 3
    driver = test_every_feature.make_engine(2, 1024, speculation=own)

    killed = test_every_feature.run_all(driver, asked, rng)

    counts = driver.engine.scheduler.draft_counts
    # Random heads are nearly never right.
    assert counts.num_accepted or (drafter == "medusa" and counts.num_tokens)
    driver.submit([2], max_tokens=1)
    driver.run(max_steps=100_000)
    driver.check_idle()
    alone = test_every_feature.make_engine(1, 1024)
    whole = [request for request in range(1, num_requests + 1) if request not in killed]
    for request in rng.sample(whole, min(len(whole), 200)):
        fields = asked[request - 1]
        again = alone.submit(**fields)
        alone.run(max_steps=100_000)
        own = test_every_feature.outputs_of(alone, again, fields)
        assert own == test_every_feature.outputs_of(driver, request, fields), fields
