"""Lookahead drafts n-grams of the text and of its own window, by the sizes of the request."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.worker.guided_engine import TOKENIZER
from tests.unit.worker.guided_engine import make_engine as make_demo_engine
from tests.unit.worker.speculation.test_drafters import sequence_of
from trimaran.comm.errors import ConfigError, RequestError
from trimaran.worker.config.speculation_config import LookaheadSizes, SpeculationConfig
from trimaran.worker.speculation.drafters import MAX_NEW, IndexRoom
from trimaran.worker.speculation.lookahead import LookaheadDrafter

SIZES = LookaheadSizes(window=3, ngram=3, verification_set=3)

CASES = {
    "the latest of equals": ([1, 7, 8, 1, 5, 6, 1], SIZES, 5, [5, 6]),
    "the most frequent": ([1, 7, 8, 1, 7, 8, 1, 5, 6, 1], SIZES, 5, [7, 8]),
    "the most frequent id, then the most frequent behind it": (
        [1, 7, 8, 1, 7, 9, 1, 5, 6, 1], SIZES, 5, [7, 9],
    ),
    "a full set has the latest": (
        [1, 7, 8, 1, 7, 9, 1, 5, 6, 1], LookaheadSizes(3, 3, 1), 5, [5, 6],
    ),
    "longer n-grams": ([1, 5, 6, 7, 1], LookaheadSizes(3, 4, 3), 5, [5, 6, 7]),
    "as many as a step verifies": ([1, 5, 6, 7, 1], LookaheadSizes(3, 4, 3), 2, [5, 6]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_n_gram_of_the_text_is_drafted(case):
    ids, sizes, most, expected = CASES[case]
    drafter = LookaheadDrafter(sizes, IndexRoom())

    assert drafter.propose(sequence_of(ids), most).tolist() == expected
    assert not drafter.is_guess


def test_the_window_of_the_last_step_is_the_next_guess():
    sequence, drafter = sequence_of([1, 2, 3, 4]), LookaheadDrafter(SIZES, IndexRoom())
    guesses = drafter.propose(sequence, 9)
    assert drafter.is_guess and len(guesses) == SIZES.window

    # The first guess was right; the ids behind the next one follow from a wrong guess.
    drafter.observe(4, [guesses[0], 50, 60, 70], 1)
    sequence.token_ids.extend([guesses[0], 50])

    found = drafter.propose(sequence, 9).tolist()
    assert drafter.is_guess and found[:2] == [60, 70]
    assert drafter.propose(sequence, 1).tolist() == [60]


def test_n_grams_of_the_window_are_drafted():
    sequence = sequence_of([1, 2, 3, 4])
    drafter = LookaheadDrafter(SIZES, IndexRoom())
    # Three iterations: each yields one id of output, and the ids behind wrong guesses.
    for first, own in ((4, [10, 20, 30]), (5, [11, 21, 31]), (6, [12, 22, 32])):
        drafter.observe(first, own, 0)
        sequence.token_ids.append(own[0])
    sequence.token_ids.append(20)

    # Positions 5, 6 and 7 of the first, second and third iteration.
    assert drafter.propose(sequence, 9).tolist() == [21, 22]
    assert not drafter.is_guess


def test_long_prompts_enter_the_pool_over_several_steps():
    room = IndexRoom()
    drafter = LookaheadDrafter(SIZES, room)
    sequence = sequence_of([*range(MAX_NEW + 50), MAX_NEW + 20])

    drafter.propose(sequence, 2)
    assert drafter.is_guess and not room.left
    room.left = MAX_NEW
    assert drafter.propose(sequence, 2).tolist() == [MAX_NEW + 21, MAX_NEW + 22]


LOOKAHEAD = SpeculationConfig(drafter="lookahead", max_draft_tokens=6, is_adaptive=False)
SENTENCE = (
    "The captain of the old ship walked along the deck and looked out over the grey sea. "
)
PROMPT = TOKENIZER.encode(SENTENCE * 3).ids
"""The model goes on with the same sentence."""


@pytest.fixture
def driver():
    """An engine of the demo model that drafts by lookahead."""
    made = make_demo_engine(speculation=LOOKAHEAD)
    yield made
    made.engine.shutdown()


def serve(driver, **fields):
    """The output of the prompt, and its drafts, their tokens, and the accepted ones."""
    counts = driver.engine.scheduler.draft_counts

    def told():
        return np.array([counts.num_drafts, counts.num_tokens, counts.num_accepted])

    before = told()
    request = driver.submit(PROMPT, max_tokens=60, top_k=1, **fields)
    driver.run(max_steps=10_000)
    return driver.output(request), *(told() - before).tolist()


def test_the_sizes_of_a_request_change_its_drafts_and_not_its_output(driver):
    plain, *counts = serve(driver, max_draft_tokens=0)
    assert counts == [0, 0, 0]

    own, num_drafts, num_tokens, num_accepted = serve(driver)
    small, num_small, num_small_tokens, num_small_accepted = serve(driver, lookahead=(1, 2, 7))

    assert own == small == plain
    # The text repeats itself, and each verification yields the accepted ids and one more.
    assert num_accepted > num_drafts
    assert num_tokens > num_drafts
    assert num_small_tokens == num_small
    assert 0 < num_small_accepted < num_accepted


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"lookahead": (7, 8, 7)}, r"are \[7, 8, 7\] but must .* at most \[7, 7, 7\]"),
        ({"lookahead": (7, 1, 7)}, r"are \[7, 1, 7\] but must .* at least \[1, 2, 1\]"),
        ({"lookahead": (7, 7)}, r"are \[7, 7\] but must be three"),
        ({"lookahead": (7, 7, "7")}, r"are \[7, 7, '7'\] but must be three whole numbers"),
        ({"lookahead": (7, 7, 7), "draft_token_ids": (5,)}, "with draft_input_ids"),
        ({"lookahead": (7, 7, 7), "beam_width": 2}, "beam_width|beams"),
    ],
)
def test_sizes_that_cannot_take_effect_are_refused(driver, fields, complaint):
    with pytest.raises(RequestError, match=complaint):
        driver.submit(PROMPT, max_tokens=4, **fields)


def test_an_engine_of_another_drafter_refuses_the_sizes(make_engine):
    driver = make_engine(speculation=SpeculationConfig(drafter="ngram"))
    with pytest.raises(RequestError, match="for an engine that is built for lookahead"):
        driver.submit([1, 2], max_tokens=4, lookahead=(7, 7, 7))


@pytest.mark.parametrize("sizes", [(0, 7, 7), (7, 1, 7), (7, 7, 0)])
def test_an_engine_needs_sizes_that_draft(sizes):
    with pytest.raises(ConfigError, match="but must be 1 or more, and the second 2 or more"):
        SpeculationConfig(drafter="lookahead", lookahead=sizes)


def test_wrong_guesses_do_not_lower_the_rate_of_n_grams(driver):
    driver.submit(PROMPT, max_tokens=60, top_k=1)
    rates = {}
    while driver.engine.has_work:
        driver.step()
        for sequence in driver.engine.scheduler.running:
            if sequence.drafts:
                rates[sequence.drafts.is_guess] = sequence.drafts.rate.value

    assert rates[False] > 0.5 > rates[True]
