"""Drafters propose what followed before, or what the client expects."""

from __future__ import annotations

import random
from array import array

import pytest

from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.requests.request import Request, Sequence
from trimaran.worker.speculation.drafters import NgramDrafter, RequestDrafter


def sequence_of(prompt, output=(), drafts=()):
    request = Request(
        source="", request_id=1, number=1, prompt_ids=array("i", prompt),
        sampling=SamplingParams(max_tokens=100), draft_token_ids=tuple(drafts),
    )  # fmt: skip
    return Sequence(request, 0, array("i", [*prompt, *output]), 1)


CASES = {
    "the ids behind the same pair": ([1, 2, 3, 4, 1, 2], 3, [3, 4, 1]),
    "the longest match counts": ([9, 1, 2, 7, 8, 1, 2, 6, 9, 1, 2], 1, [7]),
    "of equal matches the latest": ([1, 2, 7, 5, 1, 2, 6, 1, 2], 1, [6]),
    "a period repeats": ([5, 1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
    "nothing repeats": ([1, 2, 3, 4], 3, []),
    "one id": ([1], 3, []),
}


@pytest.mark.parametrize("case", CASES)
def test_ngram_drafts_are_what_followed(case):
    prompt, most, expected = CASES[case]

    assert NgramDrafter().propose(sequence_of(prompt), most).tolist() == expected


def test_an_index_that_grows_gives_the_drafts_of_a_new_one():
    rng = random.Random(4)
    sequence, drafter = sequence_of([rng.randrange(6)]), NgramDrafter()
    for _ in range(300):
        sequence.token_ids.extend(rng.randrange(6) for _ in range(rng.randrange(1, 4)))
        assert drafter.propose(sequence, 4) == NgramDrafter().propose(sequence, 4)


def test_a_long_prompt_enters_the_index_over_several_steps():
    sequence, drafter = sequence_of([1, 2, 3] * 7000), NgramDrafter()

    found = [drafter.propose(sequence, 3).tolist() for _ in range(4)]

    assert found == [[], [], [1, 2, 3], [1, 2, 3]]


def test_drafts_of_a_request_follow_the_output_until_it_differs():
    sequence, drafts = sequence_of([5], drafts=(7, 8, 9)), (7, 8, 9)
    drafter = RequestDrafter(sequence.request)

    assert tuple(drafter.propose(sequence, 5)) == drafts
    sequence.token_ids.append(7)
    assert drafter.propose(sequence, 1).tolist() == [8]
    sequence.token_ids.append(4)
    assert not drafter.propose(sequence, 5) and drafter.is_spent
