"""Routing of a request: to the least loaded group, or to a group that has the prefix."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from trimaran.server.engines.routing import (
    KNOWN_TOKEN_WORTH,
    MAX_IMBALANCE,
    MAX_KNOWN_BLOCKS,
    GroupLoad,
    KnownPrefixes,
    Prompt,
    Router,
    block_hashes,
)

SIZE = 4


def pack(ids):
    return np.asarray(ids, "<i4").tobytes()


def hashes(ids, root=b""):
    return block_hashes(pack(ids), SIZE, root)


def prompt(ids, max_tokens=0):
    return Prompt(len(ids), max_tokens, hashes(ids), SIZE)


def loads(*output_tokens):
    return [
        GroupLoad(output_tokens=owed, prefixes=KnownPrefixes(100)) for owed in output_tokens
    ]


def test_block_hashes_are_equal_for_the_common_prefix_of_prompts():
    a, b = list(range(18)), [*range(9), 0, *range(10, 18)]
    assert len(hashes(a)) == 4
    same = [x == y for x, y in zip(hashes(a), hashes(b), strict=True)]
    assert same == [True, True, False, False]
    assert hashes(a)[0] != hashes(a, b"salt")[0]
    assert hashes([1, 2, 3]) == []


@pytest.mark.parametrize("seed", range(4))
def test_the_longest_known_prefix_of_a_prompt_is_found(seed):
    draw = random.Random(seed)
    known = KnownPrefixes(MAX_KNOWN_BLOCKS)
    seen = []
    for _ in range(200):
        ids = [draw.randint(0, 1) for _ in range(draw.randint(1, 40))]
        blocks = len(ids) // SIZE
        best = max(
            (n for s in seen for n in range(blocks + 1) if s[: n * SIZE] == ids[: n * SIZE]
             and n * SIZE <= len(s)),
            default=0,
        )  # fmt: skip
        assert known.count(hashes(ids)) == best
        known.add(hashes(ids))
        seen.append(ids)


def test_memory_of_prefixes_is_bounded_and_the_oldest_tails_are_dropped_first():
    known = KnownPrefixes(6)
    old, new = list(range(16)), list(range(100, 116))
    known.add(hashes(old))
    known.add(hashes(new))
    assert len(known) == 6
    assert known.count(hashes(new)) == 4
    assert known.count(hashes(old)) == 2
    huge = KnownPrefixes(10**9)
    huge.add(range(MAX_KNOWN_BLOCKS + 5))
    assert len(huge) == MAX_KNOWN_BLOCKS


def test_the_group_with_the_fewest_outstanding_tokens_is_chosen():
    groups = loads(300, 200, 250)
    assert Router().choose(groups, prompt([1] * 8)) == 1
    groups[1].context_tokens = 60
    assert Router().choose(groups, prompt([1] * 8)) == 2


def test_equally_loaded_groups_are_chosen_in_rotation():
    router, groups = Router(), loads(0, 0, 0)
    assert [router.choose(groups, prompt([1])) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_group_with_a_cached_prefix_is_preferred_unless_much_busier():
    ids = list(range(41))
    groups = loads(1000, 0)
    groups[1].prefixes.add(hashes(ids))
    groups[1].output_tokens = 1000 + int(KNOWN_TOKEN_WORTH * 40) - 1
    assert Router().choose(groups, prompt(ids, 50)) == 1
    groups[1].output_tokens = 1000 + int(KNOWN_TOKEN_WORTH * 40) + 1
    assert Router().choose(groups, prompt(ids, 50)) == 0
    long = list(range(100, 1101))
    groups[1].prefixes.add(hashes(long))
    limit = int(MAX_IMBALANCE * 1000) + len(long) + 50
    groups[1].output_tokens = limit
    assert Router().choose(groups, prompt(long, 50)) == 1
    groups[1].output_tokens = limit + 1
    assert Router().choose(groups, prompt(long, 50)) == 0


def test_a_common_prompt_spreads_over_all_groups():
    router, groups = Router(), loads(0, 0, 0)
    ids = list(range(81))
    chosen = []
    for _ in range(60):
        chosen.append(router.choose(groups, prompt(ids, 20)))
        groups[chosen[-1]].output_tokens += 20
        groups[chosen[-1]].prefixes.add(hashes(ids))
    assert all(15 <= chosen.count(group) <= 25 for group in range(3))


def test_the_last_prompt_token_does_not_count_as_cached():
    ids = list(range(40))
    groups = loads(0, 0)
    groups[0].prefixes.add(hashes(ids))
    assert prompt(ids).num_known(groups[0]) == 39
    assert prompt(ids).num_known(groups[1]) == 0


def test_the_expected_output_is_scaled_by_the_used_part_of_finished_requests():
    router = Router()
    assert router.used_fraction == 1
    for _ in range(1000):
        router.finished(max_tokens=1000, num_tokens=100)
    assert router.used_fraction == pytest.approx(0.1)
    groups = [GroupLoad(output_tokens=2000), GroupLoad(output_tokens=1500, context_tokens=500)]
    groups[0].context_tokens = 100
    assert router.choose(groups, prompt([1])) == 0
    for _ in range(2000):
        router.finished(max_tokens=1000, num_tokens=1000)
    assert router.used_fraction == pytest.approx(1, abs=0.01)
    assert router.choose(groups, prompt([1])) == 1


def test_conversations_stay_at_their_group_and_groups_stay_balanced():
    draw, router, groups = random.Random(3), Router(), loads(0, 0)
    for group in groups:
        group.prefixes = KnownPrefixes(10**6)
    histories = {n: [n] * 40 for n in range(40)}
    homes: dict[int, list[int]] = {n: [] for n in histories}
    running: list[int] = []
    for _ in range(600):
        if len(running) == 16:
            groups[homes[running.pop(draw.randrange(16))][-1]].output_tokens -= 200
        conversation = draw.choice([n for n in histories if n not in running])
        history = histories[conversation]
        history += [draw.randrange(1000) for _ in range(20)]
        home = router.choose(groups, prompt(history, 200))
        groups[home].prefixes.add(hashes(history))
        groups[home].output_tokens += 200
        homes[conversation].append(home)
        running.append(conversation)
    moves = sum(a != b for home in homes.values() for a, b in itertools.pairwise(home))
    assert moves < 150
    assert 250 < sum(map(sum, homes.values())) < 350
