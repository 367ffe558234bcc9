"""Blocks of the KV cache are never lost, have one writer, and are found by content."""

import random
from array import array

import pytest

from trimaran.worker.kv_cache.block_pool import BlockPool
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.kv_cache.sequence_blocks import SequenceBlocks, root_hash

SIZE = 4
ROOT = root_hash(b"", 0)


def start(manager: KVCacheManager, ids: array, root: bytes = ROOT):
    """Admit a sequence, allocate all its blocks and publish the blocks as computed."""
    manager.begin_step()
    blocks = SequenceBlocks(len(manager.pools), root)
    manager.extend_hashes(blocks, ids)
    prefix = manager.prefixes.find(blocks, len(ids))
    num_computed, copies = manager.begin(blocks, prefix)
    assert manager.grow(blocks, len(ids))
    manager.publish(blocks, len(ids))
    return blocks, num_computed, copies


def ids_of(*values: int) -> array:
    return array("i", values)


def test_the_tail_of_a_request_is_evicted_before_its_head():
    pool = BlockPool(num_blocks=2)
    head, tail = pool.allocate(2)
    pool.publish(head, b"head")
    pool.publish(tail, b"tail")
    pool.release([head, tail])

    pool.allocate(1)

    assert pool.lookup(b"tail") is None
    assert pool.lookup(b"head") == head


def test_blocks_with_dropped_content_are_allocated_before_cached_blocks():
    pool = BlockPool(num_blocks=2)
    older, younger = pool.allocate(2)
    pool.publish(older, b"older")
    pool.publish(younger, b"younger")
    pool.release([older])
    pool.release([younger])

    pool.drop(b"younger")

    assert pool.allocate(1) == [younger]
    assert pool.lookup(b"older") == older


def test_blocks_without_content_are_allocated_before_cached_blocks():
    pool = BlockPool(num_blocks=2)
    cached, scratch = pool.allocate(2)
    pool.publish(cached, b"kept")
    pool.release([cached])
    pool.release([scratch])

    assert pool.allocate(1) == [scratch]
    assert pool.lookup(b"kept") == cached


def test_an_allocation_larger_than_the_free_blocks_takes_no_block():
    pool = BlockPool(num_blocks=3)

    assert pool.allocate(4) is None
    assert pool.num_free == 3


def test_a_cached_prompt_leaves_one_token_of_the_same_prompt_to_compute():
    manager = KVCacheManager([8], SIZE, enable_reuse=True)
    ids = array("i", range(10))
    first, num_computed, _ = start(manager, ids)
    assert num_computed == 0
    manager.release(first)

    second, num_computed, copies = start(manager, ids)

    assert (num_computed, copies) == (8, [])
    assert manager.num_reused_blocks == 2
    manager.check([second])


def test_a_fully_cached_prompt_takes_over_a_last_block_without_users():
    manager = KVCacheManager([2], SIZE, enable_reuse=True)
    ids = array("i", range(8))
    manager.release(start(manager, ids)[0])

    again, num_computed, copies = start(manager, ids)

    assert (num_computed, copies) == (7, [])
    assert manager.num_reused_blocks == 2
    manager.check([again])


def test_a_fully_cached_prompt_copies_a_last_block_in_use():
    manager = KVCacheManager([8], SIZE, enable_reuse=True)
    ids = array("i", range(8))
    first = start(manager, ids)[0]

    second, num_computed, copies = start(manager, ids)

    assert num_computed == 7
    assert copies == [(0, first.tables[0][1], second.tables[0][1])]
    assert first.tables[0][0] == second.tables[0][0]
    manager.check([first, second])


@pytest.mark.feature("parameter:cache_salt", of="request")
def test_prefixes_are_shared_only_under_equal_salt_and_adapter():
    manager = KVCacheManager([16], SIZE, enable_reuse=True)
    ids = array("i", range(9))
    start(manager, ids)

    assert start(manager, ids, root_hash(b"tenant", 0))[1] == 0
    assert start(manager, ids, root_hash(b"", 1))[1] == 0
    assert start(manager, ids)[1] == 8


def test_equal_blocks_after_different_prefixes_are_not_confused():
    manager = KVCacheManager([16], SIZE, enable_reuse=True)
    start(manager, ids_of(1, 1, 1, 1, 5, 6, 7, 8))

    assert start(manager, ids_of(2, 2, 2, 2, 5, 6, 7, 8, 9))[1] == 0


@pytest.mark.feature("parameter:enable_kv_cache_reuse")
def test_no_prefix_is_found_with_block_reuse_disabled():
    manager = KVCacheManager([8], SIZE, enable_reuse=False)
    ids = array("i", range(9))
    manager.release(start(manager, ids)[0])

    assert start(manager, ids)[1] == 0
    assert manager.num_reused_blocks == 0


def test_a_fork_shares_full_blocks_and_copies_the_partial_one():
    manager = KVCacheManager([8], SIZE, enable_reuse=False)
    parent = start(manager, array("i", range(10)))[0]
    child = SequenceBlocks(1, ROOT)

    num_computed, copies = manager.begin(child, manager.prefixes.find_fork(parent, 10))

    assert num_computed == 9
    assert child.tables[0][:2] == parent.tables[0][:2]
    assert copies == [(0, parent.tables[0][2], child.tables[0][2])]
    manager.check([parent, child])
    manager.release(parent)
    manager.check([child])


def test_reserved_blocks_are_allocated_only_to_their_sequence():
    manager = KVCacheManager([4], SIZE, enable_reuse=True)
    patient = start(manager, ids_of(1))[0]
    manager.reserve(patient, 3)
    greedy = SequenceBlocks(1, ROOT)

    assert manager.num_available == 1
    assert not manager.grow(greedy, 2 * SIZE)
    assert manager.grow(greedy, SIZE)
    assert manager.grow(patient, 3 * SIZE)
    manager.check([patient, greedy])
    manager.release(patient)
    assert manager.num_available == 3


def test_all_groups_agree_on_the_length_of_a_prefix():
    manager = KVCacheManager([8, 6], SIZE, enable_reuse=True)
    ids = array("i", range(12))
    manager.release(start(manager, ids)[0])
    manager.pools[1].forget(manager.pools[1].lookup(second_hash(manager, ids)))

    again, num_computed, _ = start(manager, ids)

    assert num_computed == SIZE
    manager.check([again])


def second_hash(manager: KVCacheManager, ids: array) -> bytes:
    blocks = SequenceBlocks(len(manager.pools), ROOT)
    manager.extend_hashes(blocks, ids)
    return blocks.hashes[1]


def test_invariants_of_the_cache_hold_over_random_histories():
    for seed in range(30):
        run_history(random.Random(seed))


def run_history(rng: random.Random) -> None:
    manager = KVCacheManager([20, 24], SIZE, enable_reuse=True)
    manager.set_partitions(
        [bytes(rng.randrange(2) for _ in range(count)) for count in (20, 24)]
    )
    live: list[tuple[SequenceBlocks, array]] = []
    for _ in range(150):
        action = rng.random()
        if action < 0.4:
            ids = array("i", (rng.randrange(2) for _ in range(rng.randrange(1, 24))))
            blocks = SequenceBlocks(2, ROOT)
            manager.extend_hashes(blocks, ids)
            admit(manager, rng, live, blocks, ids, manager.prefixes.find(blocks, len(ids)))
        elif action < 0.5 and live:
            parent, ids = rng.choice(live)
            child = SequenceBlocks(2, ROOT)
            prefix = manager.prefixes.find_fork(parent, len(ids))
            admit(manager, rng, live, child, ids[:], prefix)
        elif action < 0.8 and live:
            blocks, ids = rng.choice(live)
            if manager.grow(blocks, len(ids) + 1):
                ids.append(rng.randrange(2))
                manager.extend_hashes(blocks, ids)
                manager.publish(blocks, len(ids))
        elif live:
            manager.release(live.pop(rng.randrange(len(live)))[0])
        manager.check([blocks for blocks, _ in live])
    for blocks, _ in live:
        manager.release(blocks)
    manager.check([])
    assert manager.num_free == manager.num_available == 20


def admit(manager, rng, live, blocks, ids, prefix) -> None:
    manager.begin_step()
    worst = manager.blocks_for(len(ids) + rng.randrange(6))
    if manager.blocks_to_take(prefix, worst) > manager.num_available:
        return
    manager.begin(blocks, prefix)
    if rng.random() < 0.5:
        manager.reserve(blocks, worst)
    assert manager.grow(blocks, len(ids))
    manager.extend_hashes(blocks, ids)
    manager.publish(blocks, len(ids))
    live.append((blocks, ids))


def test_a_block_filled_by_this_step_is_shared_but_never_copied():
    manager = KVCacheManager([8], SIZE, enable_reuse=True)
    ids = array("i", range(8))
    manager.begin_step()
    start(manager, ids)
    second = SequenceBlocks(1, ROOT)
    manager.extend_hashes(second, ids)

    same_step = manager.prefixes.find(second, len(ids))
    manager.begin_step()
    next_step = manager.prefixes.find(second, len(ids))

    assert (len(same_step.shared[0]), same_step.last) == (1, [])
    assert (len(next_step.shared[0]), len(next_step.last)) == (1, 1)
