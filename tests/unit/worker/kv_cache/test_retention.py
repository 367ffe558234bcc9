"""The order of eviction, the content that moves to the host, and windows."""

import random
import tracemalloc
from array import array

import pytest

from trimaran.worker.kv_cache.free_blocks import FreeBlocks, Retention
from trimaran.worker.kv_cache.host_pool import HostPool
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.kv_cache.sequence_blocks import RetentionPlan, SequenceBlocks, root_hash

SIZE = 4


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def free_with_content(*blocks, clock=None) -> FreeBlocks:
    free = FreeBlocks(bytes(16), clock or Clock())
    drain(free)
    for block in blocks:
        free.add(block, has_content=True)
    return free


def drain(free: FreeBlocks) -> list[int]:
    return [free.pop() for _ in range(len(free))]


def start(manager: KVCacheManager, ids: array, retention=None):
    """Admit a sequence with complete loads, all blocks and computed tokens."""
    manager.begin_step()
    blocks = SequenceBlocks(len(manager.pools), root_hash(b"", 0))
    blocks.retention = retention
    manager.extend_hashes(blocks, ids)
    prefix = manager.prefixes.find(blocks, len(ids))
    num_computed, _ = manager.begin(blocks, prefix)
    loads = list(blocks.load)
    manager.loaded(blocks)
    assert manager.grow(blocks, len(ids))
    manager.publish(blocks, len(ids))
    return blocks, num_computed, loads


def test_low_priorities_are_evicted_first_and_the_oldest_first_within_a_priority():
    free = free_with_content(0, 1, 2, 3)
    free.retain(0, Retention(80))
    free.retain(2, Retention(10))

    assert drain(free) == [2, 1, 3, 0]


def test_a_priority_lasts_while_the_block_is_in_use_and_ends_with_its_content():
    free = free_with_content(0, 1)
    free.remove(0)
    free.retain(0, Retention(90))
    free.add(0, has_content=True)
    free.add(2, has_content=True)
    assert drain(free) == [1, 2, 0]

    free.forget(0)
    free.add(0, has_content=True)
    free.add(1, has_content=True)
    assert drain(free) == [0, 1]


@pytest.mark.feature(
    "input:retention_token_range_durations_ms", "input:retention_decode_duration_ms"
)
def test_a_priority_ends_after_its_duration_unless_a_request_renews_the_priority():
    clock = Clock()
    free = free_with_content(0, 1, 2, clock=clock)
    free.retain(0, Retention(95, 5.0))
    free.retain(1, Retention(90, 5.0))
    clock.now = 3.0
    free.retain(1, Retention(90, 5.0))
    clock.now = 6.0

    assert free.pop() == 2
    free.add(3, has_content=True)
    assert drain(free) == [0, 3, 1]


def test_renewing_the_priority_of_content_uses_no_more_memory():
    clock = Clock()
    free = free_with_content(0, 1, clock=clock)
    free.retain(0, Retention(95, 100.0))
    free.retain(1, Retention(90, 1e6))
    tracemalloc.start()
    for _ in range(20_000):
        free.retain(1, Retention(90, 1e6))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < 1 << 20

    clock.now = 200.0
    assert drain(free) == [0, 1]


def test_the_host_cache_keeps_blocks_of_higher_priority_than_the_new_block():
    host = HostPool(1)
    assert host.store(b"low", 34) is None
    slot = host.store(b"high", 60)

    assert host.store(b"usual", 35) is None
    assert host.lookup(b"high") == slot
    assert host.store(b"higher", 61) == slot
    assert host.lookup(b"high") is None
    host.check()


@pytest.mark.feature(
    "input:retention_token_range_starts",
    "input:retention_token_range_ends",
    "input:retention_decode_priority",
)
def test_ranges_of_a_prompt_and_its_output_are_kept_apart():
    plan = RetentionPlan(((0, 8, Retention(90)),), Retention(5), num_prompt_tokens=16)
    manager = KVCacheManager([6], SIZE, enable_reuse=True)
    ids = array("i", range(24))
    manager.release(start(manager, ids, plan)[0])

    manager.release(start(manager, array("i", range(100, 116)))[0])

    # Evicted are the output's blocks, and then the later half of the prompt.
    assert start(manager, ids)[1] == 8


def test_evicted_content_comes_back_from_the_host():
    manager = KVCacheManager([4], SIZE, enable_reuse=True, host_slots=8)
    ids = array("i", range(14))
    manager.release(start(manager, ids)[0])
    manager.release(start(manager, array("i", range(100, 116)))[0])
    moves, loads = manager.take_transfers()
    assert len(moves) == 3
    assert loads == []

    blocks, num_computed, loads = start(manager, ids)

    assert num_computed == 12
    slots = {block: slot for _, block, slot in moves}
    assert [slot for _, slot, _ in loads] == [slots[place] for place in (0, 1, 2)]
    assert [block for _, _, block in loads] == blocks.tables[0][:3]
    assert manager.take_transfers()[1] == loads
    assert manager.hosts[0].num_loaded == 3
    manager.check([blocks])


def test_a_prefix_in_transfer_from_the_host_is_not_loaded_twice():
    manager = KVCacheManager([6], SIZE, enable_reuse=True, host_slots=8)
    ids = array("i", range(9))
    manager.release(start(manager, ids)[0])
    manager.release(start(manager, array("i", range(100, 124)))[0])
    first, second = (SequenceBlocks(1, root_hash(b"", 0)) for _ in range(2))
    manager.extend_hashes(first, ids)
    manager.extend_hashes(second, ids)
    manager.begin(first, manager.prefixes.find(first, 9))

    assert manager.prefixes.find(second, 9).is_under_way

    manager.loaded(first)
    manager.publish(first, 8)
    assert len(manager.prefixes.find(second, 9).shared[0]) == 2


def test_a_sequence_frees_blocks_outside_its_window_and_sinks():
    manager = KVCacheManager([8], SIZE, enable_reuse=True, window=6, num_sinks=1)
    ids = array("i", range(24))
    blocks, _, _ = start(manager, ids)

    manager.free_outside_window(blocks, 23)

    # Token 23 sees tokens 18 to 23, which begin in block 4.
    assert (blocks.num_held, manager.num_free) == (3, 5)
    manager.check([blocks])
    manager.release(blocks)
    manager.check([])


def test_a_windowed_sequence_reserves_the_most_blocks_that_it_holds_at_a_time():
    manager = KVCacheManager([4], SIZE, enable_reuse=False, window=4)
    blocks = SequenceBlocks(1, root_hash(b"", 0))
    assert manager.max_held(1000, 1) == 3
    manager.reserve(blocks, 3)
    for length in range(1, 200):
        manager.free_outside_window(blocks, length - 1)
        assert manager.grow(blocks, length)
        assert manager.num_available == 1
        manager.check([blocks])


def test_a_sequence_holds_only_the_cached_blocks_within_its_window():
    manager = KVCacheManager([8], SIZE, enable_reuse=True, window=6, num_sinks=1)
    ids = array("i", range(24))
    manager.release(start(manager, ids)[0])

    blocks, num_computed, _ = start(manager, ids)

    assert (num_computed, blocks.num_blocks, blocks.num_held) == (23, 6, 3)
    manager.check([blocks])


@pytest.mark.parametrize("window", [0, 6])
def test_every_block_and_slot_is_in_one_state_over_random_histories(window):
    rng = random.Random(window)
    manager = KVCacheManager([12], SIZE, enable_reuse=True, host_slots=5, window=window)
    live = []
    for _ in range(600):
        if live and rng.random() < 0.5:
            manager.release(live.pop(rng.randrange(len(live))))
        else:
            head = rng.randrange(3)
            ids = array("i", [head * 100 + place for place in range(rng.randrange(1, 20))])
            if manager.num_available >= manager.blocks_for(len(ids)):
                plan = RetentionPlan(((0, 8, Retention(rng.choice([0, 35, 90]))),))
                live.append(start(manager, ids, plan)[0])
        for blocks in live:
            manager.free_outside_window(blocks, blocks.num_published * SIZE) if window else None
        manager.take_transfers()
        manager.check(live)


@pytest.mark.feature("input:retention_token_range_priorities")
@pytest.mark.parametrize("priority", [10, 35, 90])
def test_retention_of_a_request_decides_how_long_its_prompt_stays_cached(
    make_engine, prompt_of, priority
):
    driver = make_engine(max_tokens=16 * 12)
    first, second, third = (prompt_of(80, seed) for seed in range(3))
    retention = {"ranges": [[0, 80, priority, -1]], "output": [35, -1]}
    for prompt, said in ((second, None), (first, retention), (third, None)):
        driver.submit(prompt, max_tokens=2, retention=said)
        driver.run()
    reused = driver.engine.stats()["kv_reused_blocks"]

    driver.submit(first, max_tokens=2)
    driver.run()

    # The cache has room for two prompts and a little: the third evicts the second prompt's
    # blocks, or the first's if they have a lower priority.
    found = driver.engine.stats()["kv_reused_blocks"] - reused
    assert found == (1 if priority == 10 else 5)


def test_static_batches_report_slots_that_wait_for_the_longest_sequence(make_engine, prompt_of):
    driver = make_engine(batching="V1")
    for length in (2, 9):
        driver.submit(prompt_of(5, length), max_tokens=length)
    driver.submit(prompt_of(5, 3), max_tokens=4)
    seen = []
    while driver.engine.has_work:
        driver.step()
        stats = driver.engine.stats()
        seen.append((stats["empty_generation_slots"], stats["total_generation_tokens"]))

    assert stats["v1_batching"] == 1
    assert [slots for slots, _ in seen][:8] == [0, 1, 1, 2, 2, 2, 2, 2]
    assert [tokens for _, tokens in seen][:8] == [0, 3, 2, 2, 1, 1, 1, 1]
