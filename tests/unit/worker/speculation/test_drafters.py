"""Drafters propose what followed before, or what the client expects."""

from __future__ import annotations

import random
from array import array

import pytest

from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.requests.request import Request, Sequence
from trimaran.worker.speculation.drafters import (
    MAX_NEW,
    IndexRoom,
    NgramDrafter,
    RequestDrafter,
)


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

    found = NgramDrafter(IndexRoom()).propose(sequence_of(prompt), most)

    assert found.tolist() == expected


def test_an_index_that_grows_gives_the_drafts_of_a_new_one():
    rng = random.Random(4)
    sequence, drafter = sequence_of([rng.randrange(6)]), NgramDrafter(IndexRoom())
    for _ in range(300):
        sequence.token_ids.extend(rng.randrange(6) for _ in range(rng.randrange(1, 4)))
        new = NgramDrafter(IndexRoom())
        assert drafter.propose(sequence, 4) == new.propose(sequence, 4)


def test_long_prompts_enter_indices_over_several_steps_that_all_sequences_share():
    room = IndexRoom()
    sequences = [sequence_of([1, 2, 3] * length) for length in (3000, 4000)]
    drafters = [NgramDrafter(room) for _ in sequences]
    found = []
    for _ in range(3):
        room.left = MAX_NEW
        pairs = zip(sequences, drafters, strict=True)
        found.append([drafter.propose(each, 3).tolist() for each, drafter in pairs])

    drafts = [1, 2, 3]
    assert found == [[[], []], [drafts, []], [drafts, drafts]]


def test_drafts_of_a_request_follow_the_output_until_it_differs():
    sequence, drafts = sequence_of([5], drafts=(7, 8, 9)), (7, 8, 9)
    drafter = RequestDrafter(sequence.request)

    assert tuple(drafter.propose(sequence, 5)) == drafts
    sequence.token_ids.append(7)
    assert drafter.propose(sequence, 1).tolist() == [8]
    sequence.token_ids.append(4)
    assert not drafter.propose(sequence, 5) and drafter.is_spent
