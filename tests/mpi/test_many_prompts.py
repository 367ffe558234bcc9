"""Many prompts on several ranks: drafts of every kind change no token, beside adapters, guides,
pauses, reuse and chunks."""

from __future__ import annotations

import functools

import pytest

from tests.driver import Ranks
from tests.unit.worker.speculation.many_prompts import (
    DRAFTERS,
    corrupt,
    draw,
    make_driver,
    serve,
    with_adapters,
    with_guides,
)
from trimaran.worker.config.engine_config import GuidedConfig, ParallelConfig
from trimaran.worker.config.speculation_config import SpeculationConfig

LAYOUTS = {"tp 2": ParallelConfig(tp_size=2), "pp 2": ParallelConfig(pp_size=2)}
PARTS = [(25, 256, seed) for seed in (41, 42)]
"""Prompts, tokens of each and the seed."""


def run(world, parallel, speculation, part, drafts=None):
    """Outputs on rank 0, and this rank's scheduler. Collective."""
    asked = with_adapters(with_guides(draw(*part)))
    ranks = Ranks(world, parallel)
    driver = make_driver(
        speculation, cache_tokens=4_000, ties=ranks.ties, parallel=parallel,
        guided=GuidedConfig(backend="xgrammar"),
    )  # fmt: skip
    return ranks.run(driver, lambda one: serve(one, asked, drafts)), driver.engine.scheduler


@pytest.fixture(scope="module")
def plain_outputs(world):
    """Makes outputs without drafts on rank 0, once for all drafters."""

    @functools.cache
    def outputs(layout, part):
        return run(world, LAYOUTS[layout], SpeculationConfig(), part)[0]

    return outputs


@pytest.mark.matrix(keep=0)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"part {part[2]}")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.ranks(2, only=True)
def test_drafts_change_no_token_of_many_prompts_on_ranks_together(
    world, plain_outputs, layout, drafter, part
):
    expected = plain_outputs(layout, part)
    drafts = None
    if drafter == "draft_tokens" and world.rank == 0:
        drafts = corrupt(expected)
    told, scheduler = run(world, LAYOUTS[layout], DRAFTERS[drafter], part, drafts)
    if world.rank == 0:
        assert told == expected
        assert scheduler.draft_counts.num_accepted or drafter == "adaptive"
