"""A thousand prompts of 256 tokens each on a GPU: drafts of every kind change no token."""

from __future__ import annotations

import pytest

from tests.unit.worker.speculation.many_prompts import (
    DRAFTERS,
    corrupt,
    draw,
    make_driver,
    serve,
)
from trimaran.worker.config.speculation_config import SpeculationConfig

pytestmark = pytest.mark.gpu

CASES = [(40, 64, 0), *((100, 256, seed) for seed in range(1, 11))]
"""Prompts, tokens of each and the seed, of a short run and of all thousand."""


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} prompts, {case[2]}")
def test_drafts_of_every_kind_change_no_token_in_deterministic_mode(case):
    # All sequences fit: kernels of prompts recompute a paused sequence, and round otherwise.
    way = {"device": "cuda", "dtype": "bfloat16", "deterministic": True, "cache_tokens": 40_960}
    asked = draw(*case)
    plain = make_driver(SpeculationConfig(), **way)
    expected = serve(plain, asked)
    plain.engine.shutdown()

    for name, speculation in DRAFTERS.items():
        drafts = corrupt(expected) if name == "draft_tokens" else None
        driver = make_driver(speculation, **way)
        assert serve(driver, asked, drafts) == expected, name
        assert driver.engine.scheduler.draft_counts.num_tokens or name == "adaptive"
        driver.engine.shutdown()
