"""The partial last block of a sequence serves sequences with the same first tokens."""

from array import array

import pytest

from tests.unit.worker.scheduling.test_scheduler import BLOCK, Planner
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.kv_cache.sequence_blocks import SequenceBlocks, root_hash

SIZE = 8


def start(manager, ids):
    """Admit a sequence and allocate all its blocks; returns the sequence and its cached
    tokens."""
    manager.begin_step()
    blocks = start_of(manager, ids)
    num_cached, _ = manager.begin(blocks, manager.prefixes.find(blocks, len(ids), ids))
    assert manager.grow(blocks, len(ids))
    manager.publish(blocks, len(ids))
    return blocks, num_cached


def start_of(manager, ids):
    blocks = SequenceBlocks(1, root_hash(b"", 0))
    manager.extend_hashes(blocks, ids)
    return blocks


def ended(manager, ids):
    blocks, _ = start(manager, ids)
    manager.end(blocks, ids, len(ids), len(ids))


def ids_of(*parts):
    return array("i", [number for part in parts for number in part])


CASES = {
    "the same again": (ids_of(range(20)), 19),
    "one that goes on": (ids_of(range(30)), 20),
    "one that leaves it late": (ids_of(range(19), (99, 98)), 19),
    "one that leaves it early": (ids_of(range(17), range(90, 99)), 16),
    "one that is shorter": (ids_of(range(19)), 18),
    "one that leaves before": (ids_of(range(9), range(90, 99)), 8),
}


@pytest.mark.parametrize(("ids", "num_cached"), CASES.values(), ids=list(CASES))
def test_a_partially_matching_block_is_reused_if_half_of_a_block_or_more_matches(
    ids, num_cached
):
    manager = KVCacheManager([8], SIZE, enable_reuse=True)
    ended(manager, ids_of(range(20)))

    blocks, found = start(manager, ids)

    assert found == num_cached
    manager.check([blocks])
    manager.end(blocks, ids, len(ids), len(ids))
    manager.check([])


def test_a_partial_block_taken_over_by_a_sequence_leaves_the_prefix_cache():
    manager = KVCacheManager([8], SIZE, enable_reuse=True)
    ids = ids_of(range(20))
    ended(manager, ids)

    _, first = start(manager, ids)
    _, second = start(manager, ids)

    assert (first, second) == (19, 16)


def test_full_blocks_replace_partial_blocks_in_the_prefix_cache():
    manager = KVCacheManager([4], SIZE, enable_reuse=True)
    older, newer = ids_of(range(8)), ids_of(range(100, 112))
    ended(manager, older)
    ended(manager, newer)

    # One block never had content; the partial block is evicted next.
    other = SequenceBlocks(1, root_hash(b"", 0))
    assert manager.grow(other, 2 * SIZE)
    manager.release(other)

    found = [
        len(manager.prefixes.find(start_of(manager, ids), 9, ids).shared[0])
        for ids in (
            ids_of(older, (7,)),
            newer[:9],
        )
    ]
    assert found == [1, 1]
    assert manager.prefixes.find(start_of(manager, newer), 12, newer).last == []


def test_the_last_block_of_a_prompt_stays_cached_when_another_prompt_reuses_a_part():
    manager = KVCacheManager([8], SIZE, enable_reuse=True)
    whole = ids_of(range(30))
    blocks, _ = start(manager, whole)
    manager.end(blocks, whole, num_prompt=20, num_computed=30)

    first, num_cached = start(manager, ids_of(range(20)))

    assert num_cached == 19
    manager.check([first])
    manager.end_step()
    manager.check([first])
    assert start(manager, whole)[1] == 29


def test_partial_blocks_give_the_same_tokens_and_count_in_perf_metrics(make_engine, prompt_of):
    prompt = prompt_of(59)
    prompts = [prompt, prompt, prompt[:55], prompt[:53] + prompt_of(20, 1)]
    driver = make_engine(max_num_seqs=1)
    figures = []
    for one in prompts:
        request = driver.submit(one, max_tokens=30, return_perf_metrics=True)
        driver.run()
        alone = make_engine(enable_block_reuse=False)
        expected = alone.submit(one, max_tokens=30)
        alone.run()
        assert driver.output(request) == alone.output(expected)
        told = driver.extras[request, 0][-1]["figures"]
        names = ("alloc_new", "alloc_total", "reused")
        figures.append([told[f"kv_cache_{name}_blocks"] for name in names])

    # The copied block that the second prompt writes on in counts as new.
    assert figures[:2] == [[4, 4, 0], [1, 1, 3]]
    driver.check_idle()


def test_a_fork_copies_no_block_that_is_itself_a_copy_of_the_same_step(make_engine, prompt_of):
    driver = make_engine(max_num_seqs=2, tokens_per_block=32, max_tokens=128)
    prompt = prompt_of(10)
    driver.submit(prompt, max_tokens=100)
    for _ in range(75):
        driver.step()
    # The fork's parent is preempted when the first request takes the last block. When that
    # request ends, the parent resumes with a copy of its first block, and the fork starts.
    request = driver.submit(prompt, max_tokens=30, num_return_sequences=2)
    driver.run()

    first = driver.output(1)[:30]
    assert driver.engine.scheduler.preemptions.num_sequences == 1
    assert driver.outputs(request) == [first, first]
    driver.check_idle()


def test_a_request_of_one_token_leaves_no_block_held(make_engine, prompt_of):
    driver = make_engine()
    prompt = prompt_of(59)
    driver.submit(prompt, max_tokens=30)
    driver.run()

    driver.submit(prompt, max_tokens=1)
    driver.run()

    driver.check_idle()


@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
def test_a_sequence_that_needs_the_whole_cache_starts_beside_a_matching_partial_block(policy):
    num_blocks = 8
    planner = Planner(num_blocks=num_blocks, policy=policy)
    # Its prompt ends in a block that its output fills.
    planner.add(prompt=[1, 2, 3, 4, 5, 6], max_tokens=3)
    while planner.scheduler.has_requests:
        planner.step()

    planner.add(prompt=[1, 2, 3, 4, 5, 6, *range(10, 34)], max_tokens=num_blocks * BLOCK - 29)

    while planner.scheduler.has_requests:
        assert planner.step(), "the request waits for ever"
    planner.check_empty()
