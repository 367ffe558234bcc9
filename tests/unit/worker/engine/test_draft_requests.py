"""Requests that end after their drafts: the accepted draft ids and one further id."""

from __future__ import annotations

import pytest

from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.config.speculation_config import SpeculationConfig

DRAFTS = SpeculationConfig(drafter="draft_tokens", max_draft_tokens=8)
PROMPT, SAMPLINGS = [3, 1, 4, 1, 5], ({}, {"top_k": 20, "temperature": 1.5, "seed": 9})


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_output_ends_at_the_first_id_behind_accepted_drafts(make_engine, sampling, depth):
    driver = make_engine(depth=depth, speculation=DRAFTS)
    ((plain,),) = driver.serve([PROMPT], [sampling])
    wrong = [(each + 1) % 150 for each in plain]
    # All right, wrong at the start and in the middle, and behind an output of two ids.
    drafts = (plain[:4], wrong[:3], plain[:2] + wrong[2:5], plain[:5])
    asked = [
        driver.submit(
            PROMPT, output=plain[:num_output], max_tokens=12, draft_token_ids=tuple(ids),
            ends_after_drafts=True, **sampling,
        )
        for ids, num_output in zip(drafts, (0, 0, 0, 2), strict=True)
    ]  # fmt: skip

    driver.run()

    assert [driver.output(each) for each in asked] == [
        plain[:5], plain[:1], plain[:3], plain[2:6],
    ]  # fmt: skip
    assert {driver.reasons[each, 0] for each in asked} == {FinishReason.LENGTH}
    driver.check_idle()


def test_an_end_id_or_the_limit_ends_the_output_before_its_drafts_do(make_engine):
    driver = make_engine(speculation=DRAFTS)
    ((plain,),) = driver.serve([PROMPT])
    end_id = plain[2]
    drafts = {"draft_token_ids": tuple(plain[:8]), "ends_after_drafts": True}
    ended = driver.submit(PROMPT, max_tokens=12, end_id=end_id, **drafts)
    limited = driver.submit(PROMPT, max_tokens=3, **drafts)

    driver.run()

    assert driver.output(ended) == plain[: plain.index(end_id)]
    assert driver.reasons[ended, 0] is FinishReason.END_ID
    assert driver.output(limited) == plain[:3]
