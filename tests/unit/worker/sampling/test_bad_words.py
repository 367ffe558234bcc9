"""The ids that would complete a bad word, against a search through all words."""

from __future__ import annotations

import random

import numpy as np
import pytest

from trimaran.worker.sampling.bad_words import pack_bad_words


def plain_forbidden(words, ids):
    """The last ids of words whose preceding ids are the end of the sequence."""
    return {w[-1] for w in words if w and (len(w) == 1 or ids[1 - len(w) :] == w[:-1])}


@pytest.mark.parametrize("seed", range(100))
def test_the_forbidden_ids_are_those_of_a_search_through_all_words(seed):
    draw = random.Random(seed)
    words = tuple(
        tuple(draw.choices(range(3), k=draw.randint(0, draw.choice((2, 9)))))
        for _ in range(draw.randint(1, 40))
    )
    if not any(words):
        words = ((1,),)
    packed = pack_bad_words(words)
    ids = tuple(draw.choices(range(3), k=30))
    for length in range(1, len(ids) + 1):
        end = np.array(ids[:length][-packed.longest :] if packed.longest else (), np.int32)
        assert set(packed.forbidden(end).tolist()) == plain_forbidden(words, ids[:length])


def test_a_long_bad_word_takes_no_more_memory_than_its_ids():
    words = (*((n,) for n in range(30_000)), tuple(range(30_000)))
    packed = pack_bad_words(words)
    assert len(packed.before) == 29_999
    assert len(packed.last) == 30_001
    assert packed.forbidden(np.arange(29_999, dtype=np.int32))[-1] == 29_999


def test_rows_with_equal_bad_words_share_their_memory():
    words = ((1, 2), (3,))
    assert pack_bad_words(words) is pack_bad_words(tuple(tuple(w) for w in ([1, 2], [3])))
