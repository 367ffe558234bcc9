"""Plans of decodes with drafts: each query has all of its keys, in splits that it shares."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from trimaran.kernels.attention import AttentionMetadata
from trimaran.kernels.triton.attention.work_items import (
    FIXED_KEYS,
    MAX_FIXED_SPLITS,
    WorkPlan,
    plan_work,
)

UNIT = 32


def plan_of(pairs, most, *, is_fixed):
    """A plan of decodes with these rows of the block table and lengths."""
    rows, lengths = torch.tensor(pairs).int().T.contiguous()
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(len(pairs) + 1).int(),
        seq_lens=lengths,
        block_tables=torch.zeros(1 + int(rows.max()), 4).int(),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        max_query_len=1,
        max_seq_len=int(lengths.max()),
        num_decodes=len(pairs),
        rows=rows,
        shares_rows=True,
    )
    heads = (8, 2, 16)
    return plan_work(
        metadata, heads, len(pairs), 40, UNIT, is_fixed=is_fixed, max_queries=most
    )  # fmt: skip


def groups_of(plan: WorkPlan) -> dict[int, list[int]]:
    """The queries of each group, by the first one."""
    assert plan.shares is not None
    found = {}
    for number in range(int(plan.items[1])):
        first = int(plan.splits[number, 0])
        count, following = plan.shares[number, :2].tolist()
        found[first] = [first, *range(following, following + count - 1)]
    return found


def check(plan: WorkPlan, pairs, *, is_fixed):
    """Each query sees each of its keys once, and has partial results of its own."""
    num_items, num_splits = plan.items[:2].tolist()
    firsts = plan.items[2 : 3 + num_items].tolist()
    assert firsts[0] == 0
    assert firsts[-1] == num_splits
    assert all(first < end for first, end in pairwise(firsts))
    assert plan.shares is not None
    groups, covered, results = groups_of(plan), [0] * len(pairs), set()
    shortest = {row: min(n for own, n in pairs if own == row) for row, _ in pairs}
    for number in range(num_splits):
        first, row, begin, end, head, _, seen, _ = plan.splits[number].tolist()
        partial, known = plan.shares[number, 2:].tolist()
        assert known == shortest[row] - 1
        assert begin % UNIT == 0
        for place, query in enumerate(groups[first]):
            length = seen + place
            assert pairs[query] == (row, length)
            if begin < length:
                assert covered[query] == begin
                covered[query] = min(end, length)
            results.add(partial + (number - head) * len(groups[first]) + place)
            if is_fixed:
                least = max(-(-length // MAX_FIXED_SPLITS), FIXED_KEYS)
                assert begin % (-(-least // UNIT) * UNIT) == 0
    assert covered == [length for _, length in pairs]
    assert len(results) == sum(
        len(groups[first]) for first in plan.splits[:num_splits, 0].tolist()
    )
    assert max(results) < len(plan.partial) == len(plan.log_sums)
    assert not plan.counters.any()


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_token_and_its_drafts_are_one_group_as_far_as_columns_reach(is_fixed):
    own = [(2, 100), (0, 500), (5, 1000)]
    drafts = [(2, 101), (2, 102), (2, 103), *((0, 501 + place) for place in range(5))]
    plan = plan_of(own + drafts, 4, is_fixed=is_fixed)
    check(plan, own + drafts, is_fixed=is_fixed)
    assert groups_of(plan) == {0: [0, 3, 4, 5], 1: [1, 6, 7, 8], 2: [2], 9: [9, 10]}


def test_rows_that_pad_a_step_share_nothing():
    pairs = [(1, 40), (1, 41)] + [(7, 1)] * 20
    groups = groups_of(plan_of(pairs, 4, is_fixed=False))
    assert [len(queries) for queries in groups.values()] == [2] + [1] * 20


def test_queries_whose_keys_are_cut_elsewhere_share_nothing_in_deterministic_mode():
    pairs = [(0, 4095), (0, 4096), (0, 4097)]
    assert groups_of(plan_of(pairs, 4, is_fixed=False)) == {0: [0, 1, 2]}
    assert groups_of(plan_of(pairs, 4, is_fixed=True)) == {0: [0, 1], 2: [2]}


@pytest.mark.matrix(keep=5)
@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_steps_with_drafts_have_whole_plans(seed, is_fixed):
    draw = random.Random(seed)
    number, longest = draw.choice([1, 5, 40]), draw.choice([40, 600, 6000])
    own = [(row, draw.randint(1, longest)) for row in draw.sample(range(number + 5), number)]
    drafts = [
        (row, length + 1 + place)
        for row, length in draw.sample(own, number)
        for place in range(draw.choice([0, 0, 1, 3, 5, 9]))
    ]
    pairs = own + drafts + [(number + 5, 1)] * draw.choice([0, 3, 16])
    check(plan_of(pairs, draw.choice([2, 4, 8]), is_fixed=is_fixed), pairs, is_fixed=is_fixed)
