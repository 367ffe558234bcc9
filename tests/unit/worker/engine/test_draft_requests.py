"""Requests that end after their drafts: the accepted draft ids and one further id."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.worker.conftest import VOCAB
from trimaran.comm.errors import RequestError
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


SAMPLED = {"top_k": 50, "temperature": 1.5, "max_tokens": 8}


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_from_logits_of_the_same_law_are_all_accepted(make_engine, depth):
    driver = make_engine(depth=depth, speculation=DRAFTS)
    drawn = driver.submit(PROMPT, seed=5, return_generation_logits=True, **SAMPLED)
    driver.run()
    ids = tuple(driver.output(drawn))
    logits = b"".join(driver.told(drawn, "generation_logits"))
    others = []
    for seed in range(8):
        # Alone: without rows for all drafts a step draws itself, from the same law.
        others.append(
            driver.submit(
                PROMPT, seed=seed, draft_token_ids=ids, draft_logits=logits,
                ends_after_drafts=True, **{**SAMPLED, "max_tokens": 9},
            )
        )  # fmt: skip
        driver.run()
    continued = driver.submit(
        PROMPT, output=ids[:3], seed=9, draft_token_ids=ids,
        draft_logits=logits[3 * len(logits) // 8 :], ends_after_drafts=True,
        **{**SAMPLED, "max_tokens": 9},
    )  # fmt: skip
    driver.run()

    assert {tuple(driver.output(each)[:8]) for each in others} == {ids}
    assert all(len(driver.output(each)) == 9 for each in others)
    assert tuple(driver.output(continued)[:5]) == ids[3:]
    driver.check_idle()


def test_draft_logits_change_no_greedy_output(make_engine):
    driver = make_engine(speculation=DRAFTS)
    ((plain,),) = driver.serve([PROMPT])
    logits = np.random.default_rng(3).normal(0, 9, (6, VOCAB)).astype("<f4").tobytes()
    request = driver.submit(
        PROMPT, max_tokens=len(plain), draft_token_ids=tuple(plain[:6]), draft_logits=logits
    )
    driver.run()

    assert driver.output(request) == plain


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_a_threshold_accepts_ids_that_the_model_would_not_choose(make_engine, sampling):
    driver = make_engine(speculation=DRAFTS)
    ((plain,),) = driver.serve([PROMPT], [sampling])
    drafts = tuple((each + 1) % VOCAB for each in plain[:4])
    asked = {"draft_token_ids": drafts, "ends_after_drafts": True, "max_tokens": 12, **sampling}
    requests = [
        driver.submit(PROMPT, draft_acceptance_threshold=each, **asked)
        for each in (0.0, 1e-30, 1.0)
    ]
    requests.append(
        driver.submit(
            PROMPT, draft_acceptance_threshold=1e-30, bad_words=((drafts[1],),), **asked
        )
    )
    driver.run()

    exact, all_drafts, strict, forbidden = map(driver.output, requests)
    assert exact == strict == plain[:1]
    assert all_drafts[:4] == list(drafts)
    assert len(all_drafts) == 5
    assert forbidden[0] == drafts[0]
    assert forbidden[1] != drafts[1]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"draft_acceptance_threshold": 1.5}, "must be between 0 and 1"),
        ({"draft_acceptance_threshold": float("nan")}, "must be between 0 and 1"),
        ({"draft_logits": bytes(4 * VOCAB * 3)}, "at most 2 draft_input_ids"),
        ({"draft_logits": bytes(5)}, "holds 5 bytes but must hold"),
    ],
)
def test_wrong_rules_of_drafts_are_refused(make_engine, fields, text):
    driver = make_engine(speculation=DRAFTS)
    with pytest.raises(RequestError, match=text):
        driver.submit(PROMPT, draft_token_ids=(1, 2), **fields)
    driver.check_idle()
