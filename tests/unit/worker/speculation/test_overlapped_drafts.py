"""A network's drafts stay on the ranks: steps are planned before the last one's result."""

from __future__ import annotations

import random

import pytest

from tests.unit.worker.conftest import VOCAB
from tests.unit.worker.speculation.test_exactness import check, corrupt, draw, serve
from trimaran.worker.config.speculation_config import SpeculationConfig

MOST = 4


@pytest.fixture
def network(model_folder):
    """The target as its own draft model: its drafts are right unless it draws."""
    return SpeculationConfig(
        drafter="draft_model", draft_dir=str(model_folder), max_draft_tokens=MOST,
        is_adaptive=False,
    )  # fmt: skip


def note_decisions(driver):
    """A list that gets each decision that the engine launches."""
    launched, runner = [], driver.engine.runner
    execute = runner.execute_model

    def note(decision):
        launched.append(decision)
        return execute(decision)

    runner.execute_model = note
    return launched


def test_a_step_is_launched_before_the_drafts_of_the_last_one_are_verified(
    make_engine, network
):
    driver = make_engine(depth=2, speculation=network)
    launched = note_decisions(driver)
    request = driver.submit([3, 1, 4], max_tokens=80, top_k=1)
    driver.run()

    counts = driver.engine.scheduler.draft_counts
    assert counts.num_accepted == counts.num_tokens
    # The prompt's step drafts first. Its next step has a known place, all others have not.
    drafted = [each for each in launched if each.num_drafts]
    assert [len(each.behind_drafts) for each in drafted[1:-1]] == [MOST + 1] * (
        len(drafted) - 2
    )
    assert not any(len(each.decode_ids) for each in drafted[:-1])
    # Steps that count all drafts as accepted are as many as steps that wait would be.
    assert len(driver.output(request)) == 80
    assert len(launched) <= 80 / (MOST + 1) + 4


@pytest.mark.parametrize(
    "change", [{}, {"host_bytes": 1 << 21}, {"max_num_batched_tokens": 24, "max_tokens": 2048}]
)
def test_the_cache_of_a_network_follows_steps_that_do_not_wait(make_engine, network, change):
    """Sequences that pause, and prompts whose blocks are reused, go on to draft rightly."""
    values = {"tokens_per_block": 4, "max_tokens": 320, "max_num_batched_tokens": 40}
    driver = make_engine(depth=2, speculation=network, **{**values, **change})
    rng = random.Random(6)
    start = [rng.randrange(VOCAB) for _ in range(24)]
    for number in range(24):
        driver.submit([*start[: number % 25], number], max_tokens=50, top_k=1)
        driver.step()
    driver.run(max_steps=100_000)
    driver.check_idle()

    counts = driver.engine.scheduler.draft_counts
    assert driver.engine.scheduler.cache.num_reused_blocks
    assert counts.num_accepted == counts.num_tokens > 0


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_drafts_of_requests_beside_those_of_a_network_change_no_output(
    make_engine, model_folder, is_adaptive
):
    rng = random.Random(is_adaptive)
    asked = [draw(rng) for _ in range(60)]
    expected = serve(make_engine(max_beam_width=3), asked)
    outputs = [ids[0] if ids else [] for ids, *_ in expected]
    drafts = [
        corrupt(rng, rng.choice(["right", "wrong", "mixed", "beyond"]), output)
        if rng.random() < 0.3 and "beam_width" not in fields
        else ()
        for output, (_, fields) in zip(outputs, asked, strict=True)
    ]
    own = SpeculationConfig(
        drafter="draft_model", draft_dir=str(model_folder), max_draft_tokens=6,
        is_adaptive=is_adaptive,
    )  # fmt: skip

    driver = make_engine(depth=2, max_beam_width=3, speculation=own)
    launched = note_decisions(driver)
    check(serve(driver, asked, drafts), expected)

    assert any(len(each.behind_drafts) for each in launched) or is_adaptive
    assert any(len(each.decode_ids) for each in launched)
