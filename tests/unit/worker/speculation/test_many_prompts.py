"""A thousand prompts of 256 tokens each: drafts of every kind change no token."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from tests.unit.worker.speculation.head_reference import random_medusa
from tests.unit.worker.speculation.many_prompts import (
    DRAFTERS,
    MODEL,
    corrupt,
    draw,
    make_driver,
    serve,
    with_adapters,
    with_guides,
)
from trimaran.worker.config.engine_config import GuidedConfig
from trimaran.worker.config.speculation_config import SpeculationConfig

SEEDS = range(31, 36)
"""Seeds of twenty prompts each, with adapters and guides."""

PARTS = [(12, 40, 0), *((50, 256, seed) for seed in range(1, 21))]
"""Prompts, tokens of each and the seed, of the cut in `make test` and of all thousand."""


@pytest.mark.timeout(1200)
@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part[0]} prompts, {part[2]}")
def test_drafts_of_every_kind_change_no_token_of_many_prompts(part, tmp_path):
    folder = random_medusa(tmp_path, LlamaConfig.from_pretrained(MODEL), num_heads=3)
    medusa = SpeculationConfig(
        drafter="medusa", draft_dir=str(folder), max_draft_tokens=3, is_adaptive=False
    )
    asked = draw(*part)
    expected = serve(make_driver(SpeculationConfig()), asked)
    assert all(len(output) == part[1] for output in expected)

    for name, speculation in {**DRAFTERS, "medusa": medusa}.items():
        drafts = corrupt(expected) if name == "draft_tokens" else None
        driver = make_driver(speculation)
        assert serve(driver, asked, drafts) == expected, name
        counts = driver.engine.scheduler.draft_counts
        # Random heads are nearly never right, and the adaptive engine measures at first.
        assert counts.num_tokens or name == "adaptive"
        assert counts.num_accepted or name in ("medusa", "adaptive")


@pytest.mark.matrix(keep=0)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_no_token_beside_adapters_and_guides(drafter, seed):
    asked = with_adapters(with_guides(draw(20, 256, seed)))
    guided = GuidedConfig(backend="xgrammar")
    # Sequences are preempted: twenty have room for 200 tokens each.
    plain = make_driver(SpeculationConfig(), cache_tokens=4_000, guided=guided)
    expected = serve(plain, asked)
    plain.engine.shutdown()
    guides = [output for output, (_, fields) in zip(expected, asked, strict=True)
              if "guide" in fields]  # fmt: skip
    assert sum(1 < len(output) < 256 for output in guides) >= 2

    driver = make_driver(DRAFTERS[drafter], cache_tokens=4_000, guided=guided)
    drafts = corrupt(expected) if drafter == "draft_tokens" else None
    assert serve(driver, asked, drafts) == expected
    assert driver.engine.scheduler.draft_counts.num_accepted or drafter == "adaptive"
    driver.engine.shutdown()
