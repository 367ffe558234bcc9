"""A thousand prompts of 256 tokens each on a GPU: drafts of every kind change no token, nor do
sequences that are preempted."""

from __future__ import annotations

import pytest

from tests.unit.worker.speculation.many_prompts import (
    DRAFTERS,
    corrupt,
    draw,
    make_driver,
    serve,
    with_adapters,
    with_guides,
)
from trimaran.worker.config.engine_config import GuidedConfig
from trimaran.worker.config.speculation_config import SpeculationConfig

pytestmark = pytest.mark.gpu

ALL_FIT = 40_960
"""Tokens of a cache in which no sequence is preempted."""

CASES = [
    (40, 64, 0, ALL_FIT),
    *((250, 256, seed, 8_000) for seed in range(1, 5)),
    *((100, 256, seed, ALL_FIT) for seed in range(1, 4)),
]
"""Prompts, tokens of each, the seed and tokens of the cache: a short run, then a thousand with
preemptions, and some without. Requests of odd seeds have LoRA adapters. Every third seed has
guides."""


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[2]}, cache of {case[3]}")
def test_drafts_of_every_kind_change_no_token_in_deterministic_mode(case):
    way = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
    *drawn, cache_tokens = case
    asked = draw(*drawn)
    if drawn[-1] % 2:
        asked = with_adapters(asked)
    if drawn[-1] % 3 == 1:
        asked = with_guides(asked)
        way["guided"] = GuidedConfig(backend="xgrammar")
    plain = make_driver(SpeculationConfig(), cache_tokens=ALL_FIT, **way)
    expected = serve(plain, asked)
    plain.engine.shutdown()

    drafters = {"none": SpeculationConfig(), **DRAFTERS} if cache_tokens < ALL_FIT else DRAFTERS
    num_preempted = 0
    for name, speculation in drafters.items():
        drafts = corrupt(expected) if name == "draft_tokens" else None
        driver = make_driver(speculation, cache_tokens=cache_tokens, **way)
        assert serve(driver, asked, drafts) == expected, name
        scheduler = driver.engine.scheduler
        assert scheduler.draft_counts.num_tokens or name in ("none", "adaptive")
        num_preempted += scheduler.preemptions.num_sequences
        driver.engine.shutdown()
    assert bool(num_preempted) == (cache_tokens < ALL_FIT)
