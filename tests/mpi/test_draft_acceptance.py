"""Drafts of guided requests, and drafts with logits or a threshold, over several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.driver import Driver, Ranks
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    GuidedConfig,
    ParallelConfig,
    SchedulerConfig,
)
from trimaran.worker.config.speculation_config import SpeculationConfig

MODEL = Path(__file__).parents[2] / "examples" / "demo_models" / "base"
NGRAM = SpeculationConfig(drafter="ngram", max_draft_tokens=6, is_adaptive=False)
LAYOUTS = {
    "tp 2": ParallelConfig(tp_size=2),
    "pp 2": ParallelConfig(pp_size=2),
    "dp 2": ParallelConfig(dp_size=2),
}


def make_driver(parallel, ties):
    scheduler = SchedulerConfig(
        max_num_batched_tokens=96, max_num_seqs=12, max_seq_len=120, max_input_len=100,
        policy="max_utilization", speculation=NGRAM,
    )  # fmt: skip
    return Driver(
        EngineConfig(
            model="test", engine_dir=str(MODEL), dtype="float32", device="cpu",
            parallel=parallel, scheduler=scheduler,
            cache=CacheConfig(tokens_per_block=8, max_tokens=768),
            guided=GuidedConfig(backend="xgrammar"),
        ),
        ties=ties,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["tp 2", "pp 2"])
@pytest.mark.ranks(2, only=True)
def test_draft_logits_and_thresholds_decide_on_all_ranks(world, layout):
    sampling = {"top_k": 50, "temperature": 1.5}
    prompt = [3, 1, 4, 1, 5]

    def run(driver):
        drawn = driver.submit(
            prompt, seed=5, return_generation_logits=True, max_tokens=6, **sampling
        )
        driver.run(max_steps=100_000)
        ids = tuple(driver.output(drawn))
        logits = b"".join(driver.told(drawn, "generation_logits"))
        found = []
        for rule in ({"draft_logits": logits}, {"draft_acceptance_threshold": 1e-30}):
            again = driver.submit(
                prompt, seed=8, max_tokens=9, draft_token_ids=ids, ends_after_drafts=True,
                **sampling, **rule,
            )  # fmt: skip
            driver.run(max_steps=100_000)
            found.append(driver.output(again))
        return ids, found

    ranks = Ranks(world, LAYOUTS[layout])
    driver = make_driver(LAYOUTS[layout], ranks.ties)
    told = ranks.run(driver, run)
    if world.rank == 0:
        ids, found = told
        assert [tuple(output[:6]) for output in found] == [ids, ids]
        assert [len(output) for output in found] == [7, 7]


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.ranks(2, only=True)
def test_drafts_change_no_guided_output_of_ranks_together(world, layout):
    guide = {
        "guide_type": "regex", "guide": "((red|green|blue) [0-9]{2}, ){4}", "end_id": 1,
        "max_tokens": 50,
    }  # fmt: skip

    def run(driver):
        told = []
        for limit in ({"max_draft_tokens": 0}, {}):
            requests = [
                driver.submit([9, 8, 7], seed=n, temperature=0.9, top_p=0.9, **guide, **limit)
                for n in range(6)
            ]
            driver.run(max_steps=1_000_000)
            told.append([driver.output(each) for each in requests])
        return told

    ranks = Ranks(world, LAYOUTS[layout])
    driver = make_driver(LAYOUTS[layout], ranks.ties)
    told = ranks.run(driver, run)
    if world.rank == 0:
        plain, drafted = told
        assert drafted == plain
        assert driver.engine.scheduler.draft_counts.num_accepted
