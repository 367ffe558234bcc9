"""Networks that draft change no output on a GPU: the shipped EAGLE-3 head and draft model."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.driver import Driver
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from trimaran.worker.config.speculation_config import SpeculationConfig

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODEL = EXAMPLES / "demo_models" / "base"
DRAFTERS = {
    "eagle": EXAMPLES / "draft_heads" / "eagle",
    "draft_model": EXAMPLES / "demo_models" / "draft",
}
BEGINNINGS = (
    "Once upon a time there was", "It was a dark and", "The old man looked at the sea and",
    "The captain ordered the men to",
)  # fmt: skip
MAX_SEQ_LEN = 400


def make_driver(speculation: SpeculationConfig, *, has_graphs: bool = True) -> Driver:
    return Driver(
        EngineConfig(
            model="test",
            engine_dir=str(MODEL),
            device="cuda",
            dtype="bfloat16",
            deterministic=True,
            cuda_graphs=has_graphs,
            scheduler=SchedulerConfig(
                max_num_batched_tokens=2048,
                max_num_seqs=8,
                max_seq_len=MAX_SEQ_LEN,
                max_input_len=MAX_SEQ_LEN - 60,
                speculation=speculation,
            ),
            cache=CacheConfig(max_tokens=8 * MAX_SEQ_LEN),
        )
    )


def outputs(driver: Driver) -> list[list[int]]:
    """150 greedy tokens behind each beginning, all at once."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    requests = [
        driver.submit(tokenizer.encode(text).ids, max_tokens=150, top_k=1)
        for text in BEGINNINGS
    ]
    driver.run(10000)
    return [driver.output(request) for request in requests]


def drafts_by(drafter: str) -> SpeculationConfig:
    return SpeculationConfig(
        drafter=drafter,
        draft_dir=str(DRAFTERS[drafter]),
        max_draft_tokens=4,
        is_adaptive=False,
    )


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_network_changes_no_output_and_saves_steps(drafter):
    plain = make_driver(SpeculationConfig())
    expected = outputs(plain)
    plain.engine.shutdown()

    driver = make_driver(drafts_by(drafter))
    drafting = driver.engine.runner.drafting
    assert drafting is not None
    # Passes of 1 to 40 rows, and 1 to 4 drafts of 1 to 8 sequences.
    assert drafting.num_graphs == 8 + 4 * 4
    assert outputs(driver) == expected
    counts = driver.engine.scheduler.draft_counts
    driver.engine.shutdown()
    # Two drafted tokens in three steps would be few for networks that know these texts.
    assert counts.num_accepted > 2 / 3 * counts.num_drafts
    assert driver.num_steps < plain.num_steps


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_graphs_change_no_draft(drafter):
    found = []
    for has_graphs in (True, False):
        driver = make_driver(drafts_by(drafter), has_graphs=has_graphs)
        texts = outputs(driver)
        counts = driver.engine.scheduler.draft_counts
        found.append((texts, counts.num_drafts, counts.num_tokens, counts.accepted_at))
        driver.engine.shutdown()
    assert found[0] == found[1]
