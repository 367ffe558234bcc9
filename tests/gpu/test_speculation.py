"""Draft tokens change no output on a GPU: in float32, and in bfloat16 where tokens do not
depend on the batch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.driver import Driver
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from trimaran.worker.config.speculation_config import SpeculationConfig

pytestmark = pytest.mark.gpu

VOCAB = 150
NONE = SpeculationConfig()
ASKED = SpeculationConfig(drafter="draft_tokens", max_draft_tokens=6)
NGRAM = SpeculationConfig(drafter="ngram", max_draft_tokens=5, is_adaptive=False)
SAMPLINGS: tuple[dict, ...] = (
    {"max_tokens": 60},
    {"max_tokens": 40, "top_k": 20, "seed": 3},
    {"max_tokens": 40, "top_p": 0.9, "seed": 4, "min_tokens": 3, "end_id": 7},
    {"max_tokens": 40, "repetition_penalty": 1.2, "bad_words": ((3, 4), (9,))},
    {"max_tokens": 40, "no_repeat_ngram_size": 2, "return_log_probs": True},
)


def make_driver(folder, speculation, **changes):
    values = {"dtype": "float32", "depth": 2, "cuda_graphs": True, "deterministic": False}
    values |= changes
    return Driver(
        EngineConfig(
            model="test",
            engine_dir=folder,
            device="cuda",
            dtype=values["dtype"],
            cuda_graphs=values["cuda_graphs"],
            deterministic=values["deterministic"],
            scheduler=SchedulerConfig(
                max_num_batched_tokens=96,
                max_num_seqs=8,
                max_seq_len=128,
                max_input_len=127,
                policy="max_utilization",
                depth=values["depth"],
                speculation=speculation,
            ),
            cache=CacheConfig(tokens_per_block=16, max_tokens=1024),
        )
    )


def serve(driver, drafts=()):
    """Outputs of all prompts under all samplings."""
    requests = []
    for number in range(20):
        words = np.random.default_rng(number % 4).integers(2, VOCAB, 3)
        prompt = np.random.default_rng(number).choice(words, 30).tolist()
        own = {"draft_token_ids": drafts[number]} if drafts else {}
        requests.append(driver.submit(prompt, **SAMPLINGS[number % len(SAMPLINGS)], **own))
    driver.run(max_steps=100_000)
    return [driver.output(request) for request in requests]


WAYS = {
    "graphs": {},
    "launched": {"cuda_graphs": False},
    "without overlap": {"depth": 1},
    "bfloat16, deterministic": {"dtype": "bfloat16", "deterministic": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_drafts_change_no_output(folder, way):
    plain = serve(make_driver(folder, NONE, **WAYS[way]))

    driver = make_driver(folder, NGRAM, **WAYS[way])
    assert serve(driver) == plain
    assert driver.engine.scheduler.draft_counts.num_accepted

    driver = make_driver(folder, ASKED, **WAYS[way])
    right = [tuple(output[:6]) for output in plain]
    wrong = [(*ids[:2], *((each + 1) % VOCAB for each in ids[2:])) for ids in right]
    for drafts in (right, wrong):
        assert serve(driver, drafts) == plain
    counts = driver.engine.scheduler.draft_counts
    assert 0 < counts.num_accepted < counts.num_tokens


def test_graphs_have_rows_for_drafts(folder):
    driver = make_driver(folder, NGRAM)

    assert driver.engine.runner.graph_size(8 * (1 + NGRAM.max_draft_tokens)) == 48
