"""The ids that would repeat an n-gram: those of a search through the whole sequence."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from trimaran.worker.sampling import ngram_index
from trimaran.worker.sampling.ngram_index import NgramIndex

SIZES = [1, 2, 3, 4, 7, 20, 1 << 31]


def plain_forbidden(ids: list[int], size: int) -> set[int]:
    """The last ids of all n-grams whose preceding ids are the end of the sequence."""
    places = range(len(ids) - size + 1)
    tail = ids[len(ids) - size + 1 :]
    return {ids[p + size - 1] for p in places if ids[p : p + size - 1] == tail}


def check(index: NgramIndex, ids: list[int], size: int) -> None:
    found = index.forbidden(np.array(ids, np.int32)).tolist()
    assert len(found) == len(set(found))
    assert set(found) == plain_forbidden(ids, size)


@pytest.fixture(params=["spread hashes", "equal hashes"])
def hashes(request, monkeypatch):
    """With equal hashes only the comparison of ids distinguishes contexts."""
    if request.param == "equal hashes":
        monkeypatch.setattr(ngram_index, "_MODULUS", 3)
        monkeypatch.setattr(ngram_index, "_BASE", 2)
        monkeypatch.setattr(ngram_index, "_INVERSE", 2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_kinds", [1, 2, 5])
def test_the_index_finds_the_ids_that_a_search_of_the_whole_sequence_finds(
    hashes, size, num_kinds
):
    rng = random.Random(size * num_kinds)
    index, ids = NgramIndex(size), [rng.randrange(num_kinds) for _ in range(40)]
    for _ in range(150):
        check(index, ids, size)
        ids += [rng.randrange(num_kinds) for _ in range(rng.choice([1, 1, 1, 3]))]


@pytest.mark.parametrize("size", SIZES)
def test_ids_of_the_sequence_may_be_replaced_and_removed(hashes, size):
    rng = random.Random(size)
    index, ids = NgramIndex(size), [rng.randrange(3) for _ in range(30)]
    for _ in range(300):
        check(index, ids, size)
        start = rng.randrange(len(ids) + 1)
        if rng.random() < 0.3:
            ids = ids[:start]
            index.rewrite(start)
        elif rng.random() < 0.5:
            ids[start:] = [rng.randrange(3) for _ in ids[start:]]
            index.rewrite(start)
        ids += [rng.randrange(3) for _ in range(rng.randrange(1, 4))]


def test_the_index_notices_a_shortened_sequence():
    index = NgramIndex(2)
    check(index, [1, 2, 1, 3, 1], 2)
    check(index, [1, 2, 1], 2)
    check(index, [1, 2, 1, 4, 1], 2)


@pytest.mark.parametrize("size", [2, 5, 10_000])
def test_indexed_ids_are_not_read_again(size):
    """The cost of an id is that of the reads, and of as many steps."""
    length = 20_000
    index, table = NgramIndex(size), np.zeros(length + 10, np.int32)
    index.forbidden(table[:length])
    # An index that read old ids once more would see that they have changed.
    table[:length] = np.arange(length)
    for end in range(length + 1, length + 10):
        assert index.forbidden(table[:end]).tolist() == [0]


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_memory_is_in_proportion_to_the_sequence(size):
    ids = np.random.default_rng(0).integers(0, 100_000, 20_000).astype(np.int32)
    tracemalloc.start()
    index = NgramIndex(size)
    index.forbidden(ids)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 500 * len(ids)
