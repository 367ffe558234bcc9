"""Steps that a graph holds up to their ids give the tokens of steps that are sampled apart."""

from __future__ import annotations

import numpy as np
import pytest

from tests.driver import Driver
from tests.gpu.hidden_waits import no_hidden_waits
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from trimaran.worker.execution.whole_steps import WholeSteps

pytestmark = pytest.mark.gpu

VOCAB = 150
GREEDY = {}
SEEDED = {"temperature": 1.3, "top_p": 1.0, "seed": 11}
PLAIN = [GREEDY, SEEDED, {**SEEDED, "seed": 12, "temperature": 0.4}]
"""Requests that a graph samples without filters."""

FILTERED = [{"top_k": 20, "seed": 3}, {"top_p": 0.8, "seed": 4}, {"min_p": 0.02, "seed": 5}]
"""Requests that a graph samples with filters."""

OTHERS = [
    {"top_p": 0.9, "seed": 4, "min_tokens": 3, "end_id": 7},
    {"top_p": 1.0, "seed": 5, "repetition_penalty": 1.2, "bad_words": ((3, 4), (9,))},
    {"top_p": 0.9, "seed": 6, "top_p_decay": 0.9, "top_p_reset_ids": 3},
    {"return_log_probs": True},
    {"return_generation_logits": True},
    {"beam_width": 2, "num_return_sequences": 2, "end_id": 7},
]
"""Requests that are sampled apart from the graph."""


@pytest.fixture
def driver(folder):
    config = EngineConfig(
        model="test",
        engine_dir=folder,
        device="cuda",
        dtype="float32",
        scheduler=SchedulerConfig(
            max_num_batched_tokens=64,
            max_num_seqs=12,
            max_seq_len=128,
            max_input_len=127,
            max_beam_width=2,
            policy="max_utilization",
            depth=2,
        ),
        cache=CacheConfig(tokens_per_block=16, max_tokens=1536),
    )
    return Driver(config)


@pytest.fixture
def counts(monkeypatch):
    """The sequences of the steps that a graph held to their end."""
    found = []
    run = WholeSteps.run

    def record(self, decision, most_tokens, marks):
        output = run(self, decision, most_tokens, marks)
        if output is not None:
            found.append(len(decision.rows))
        return output

    monkeypatch.setattr(WholeSteps, "run", record)
    return found


def serve(driver, samplings):
    """Outputs of requests that begin and end at different steps."""
    requests = []
    for number, sampling in enumerate(samplings):
        prompt = np.random.default_rng(number).integers(0, VOCAB, 1 + 7 * number % 40)
        longest = {"max_tokens": 30 + 13 * number % 50}
        requests.append(driver.submit(prompt, **{**longest, **sampling}))
        for _ in range(number % 3):
            driver.step()
    driver.run()
    driver.check_idle()
    return [driver.outputs(request) for request in requests]


@pytest.mark.parametrize("count", [1, 2, 3, 12])
@pytest.mark.parametrize("kinds", [PLAIN, FILTERED, PLAIN + FILTERED], ids=len)
def test_whole_steps_give_the_tokens_of_steps_that_are_sampled_apart(
    driver, counts, count, kinds
):
    samplings = [kinds[number % len(kinds)] for number in range(count)]
    found = serve(driver, samplings)
    assert count in counts
    counts.clear()
    driver.engine.runner._whole = None

    assert serve(driver, samplings) == found
    assert not counts


def test_rows_beside_others_with_more_needs_have_the_tokens_of_steps_sampled_apart(
    driver, counts
):
    short = [{"max_tokens": 20, **other} for other in OTHERS]
    pairs = zip(PLAIN + FILTERED, short, strict=True)
    samplings = [each for pair in pairs for each in pair]
    found = serve(driver, samplings)
    # At the end the rows that need draws alone run alone.
    assert counts
    driver.engine.runner._whole = None

    assert serve(driver, samplings) == found


@pytest.mark.parametrize("sampling", [SEEDED, FILTERED[0]], ids=["plain", "filtered"])
def test_a_seeded_row_draws_the_same_whatever_the_rows_before_it_were(driver, counts, sampling):
    first = serve(driver, [sampling])
    serve(driver, OTHERS)
    counts.clear()

    assert serve(driver, [sampling]) == first
    assert counts


def test_whole_steps_make_no_hidden_synchronization_with_the_device(driver, counts):
    serve(driver, PLAIN + FILTERED)
    counts.clear()

    with no_hidden_waits():
        serve(driver, PLAIN + FILTERED)

    assert counts
