"""A sequence's blocks lie in one L2 partition as long as that costs no content."""

import random
from array import array

import pytest

from trimaran.worker.kv_cache.block_pool import BlockPool
from trimaran.worker.kv_cache.free_blocks import Retention
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.kv_cache.sequence_blocks import SequenceBlocks, root_hash

PARTITIONS = bytes([0, 1, 1, 0, 1, 0, 0, 1, 1, 0])


def placed_pool() -> BlockPool:
    pool = BlockPool(len(PARTITIONS))
    pool.set_partitions(PARTITIONS)
    return pool


def partitions_of(blocks: list[int]) -> set[int]:
    return {PARTITIONS[block] for block in blocks}


def test_a_sequence_grows_in_the_partition_of_its_first_block():
    pool = placed_pool()
    first, second = pool.allocate(1), pool.allocate(1)
    assert partitions_of(first) != partitions_of(second)
    for _ in range(4):
        first += pool.allocate(1, first)
        second += pool.allocate(1, second)
    assert len(partitions_of(first)) == len(partitions_of(second)) == 1
    assert pool.num_free == 0


def test_a_sequence_begins_in_the_partition_with_more_free_blocks():
    pool = placed_pool()
    held = pool.allocate(2)
    assert partitions_of(pool.allocate(1)).isdisjoint(partitions_of(held))
    pool.release(held)
    assert partitions_of(pool.allocate(1)) == partitions_of(held)


def test_blocks_of_the_other_partition_are_taken_when_a_partition_is_full():
    pool = placed_pool()
    blocks = pool.allocate(7)
    assert [PARTITIONS[block] for block in blocks].count(PARTITIONS[blocks[0]]) == 5
    assert pool.allocate(4, blocks) is None
    assert len(pool.allocate(3, blocks)) == 3


def test_no_content_is_evicted_for_a_partition_while_empty_blocks_are_free():
    pool = placed_pool()
    blocks = pool.allocate(5)
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.release(blocks)
    taken = pool.allocate(5, blocks)
    assert partitions_of(taken).isdisjoint(partitions_of(blocks))
    assert all(pool.lookup(bytes([block])) == block for block in blocks)


def filled_pool() -> BlockPool:
    """Blocks that alternate between partitions, with content that was freed in their order."""
    pool = BlockPool(64)
    pool.set_partitions(bytes(range(2)) * 32)
    blocks = pool.allocate(64)
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.release(range(63, -1, -1))
    return pool


def test_the_oldest_content_of_the_partition_is_evicted_first_among_equal_priorities():
    pool = filled_pool()
    assert pool.allocate(4, [1]) == [1, 3, 5, 7]
    assert pool.allocate(3, [0]) == [0, 2, 4]


@pytest.mark.parametrize("priority", [35, 60])
def test_much_older_content_of_the_other_partition_is_evicted_first(priority):
    pool = filled_pool()
    for block in range(64):
        pool.retain(bytes([block]), Retention(priority))
    # The content is older by an eighth of all blocks then.
    assert pool.allocate(8, [0]) == [0, 2, 4, 6, 8, 1, 10, 3]
    assert pool.allocate(2, [0]) == [12, 5]


def test_a_new_sequence_starts_in_the_partition_with_empty_blocks_and_stays_there():
    pool = BlockPool(8)
    pool.set_partitions(bytes([0, 0, 0, 0, 0, 1, 1, 1]))
    blocks = [*pool.allocate(1, [5]), *pool.allocate(5, [0]), *pool.allocate(1, [5])]
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.release(blocks[5::-1])
    # Partition 0 has more free blocks, but the only block without content is in partition 1.
    assert pool.allocate(2) == [7, 5]


def converse(manager: KVCacheManager, ids: array) -> int:
    """Run one sequence of these ids from start to end; returns its cached tokens."""
    blocks = SequenceBlocks(1, root_hash(b"", 0))
    manager.extend_hashes(blocks, ids)
    num_found, _ = manager.begin(blocks, manager.prefixes.find(blocks, len(ids)))
    assert manager.grow(blocks, len(ids))
    manager.publish(blocks, len(ids))
    manager.release(blocks)
    return num_found


@pytest.mark.parametrize("is_placed", [False, True])
def test_content_behind_a_shared_prefix_may_fill_both_partitions(is_placed):
    size, num_blocks = 4, 400
    manager = KVCacheManager([num_blocks], size, enable_reuse=True)
    if is_placed:
        draw = random.Random(5)
        manager.set_partitions([bytes(draw.randrange(2) for _ in range(num_blocks))])
    for number in range(40):
        converse(manager, array("i", [number] * 10 * size))
    # The sequences take 310 blocks and all begin with the same 10 blocks in one partition.
    chats = [array("i", [100] * 10 * size + [number] * 10 * size) for number in range(30)]
    for _ in range(2):
        for ids in chats:
            converse(manager, ids)
    assert [converse(manager, ids) for ids in chats] == [19 * size] * 30


@pytest.mark.parametrize("enable_reuse", [False, True])
def test_sequences_that_come_and_go_stay_in_their_partitions(enable_reuse):
    draw = random.Random(3)
    partitions = bytes(draw.randrange(2) for _ in range(400))
    manager = KVCacheManager([400], 16, enable_reuse=enable_reuse)
    manager.set_partitions([partitions])
    running: list[SequenceBlocks] = []
    for _ in range(2000):
        if len(running) < 12:
            running.append(SequenceBlocks(1, root_hash(b"", 0)))
            assert manager.grow(running[-1], draw.randrange(1, 100))
        for blocks in draw.sample(running, len(running) // 2):
            assert manager.grow(blocks, blocks.num_blocks * 16 + 1)
        for blocks in running:
            assert len({partitions[block] for block in blocks.tables[0]}) == 1
        for blocks in [each for each in running if each.num_blocks > 15]:
            manager.release(blocks)
            running.remove(blocks)
        manager.check(running)
