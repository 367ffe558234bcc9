"""KV blocks that were evicted to the host and loaded again give the same tokens."""

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.worker.kv_cache.block_pool import BlockPool
from trimaran.worker.kv_cache.free_blocks import Retention
from trimaran.worker.kv_cache.host_pool import HostPool
from trimaran.worker.steps.step_types import TransferKind

HOST_BYTES = 1 << 20
SMALL = {"max_tokens": 208, "host_bytes": HOST_BYTES}


def outputs_of(driver, prompts, **sampling):
    ids = [driver.submit(prompt, max_tokens=12, **sampling) for prompt in prompts]
    driver.run()
    driver.check_idle()
    return [driver.output(number) for number in ids]


@pytest.mark.feature("parameter:kv_cache_host_memory_bytes")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"depth": 2},
        {"max_num_batched_tokens": 23, "depth": 2},
        {"policy": "guaranteed_no_evict"},
        {"policy": "static_batch"},
        {"attention_windows": (33,), "num_sinks": 4},
    ],
    ids=str,
)
def test_blocks_from_host_memory_give_the_same_tokens(make_engine, prompt_of, changes):
    prompts = [prompt_of(100, seed) for seed in range(4)]
    windows = {name: changes[name] for name in changes if "_" in name and "win" in name}
    windows |= {"num_sinks": changes["num_sinks"]} if "num_sinks" in changes else {}
    expected = outputs_of(make_engine(enable_block_reuse=False, **windows), prompts)
    driver = make_engine(**{**SMALL, **changes})
    host = driver.engine.scheduler.cache.hosts[0]

    for _ in range(3):
        assert outputs_of(driver, prompts) == expected

    assert host.num_stored > 0
    assert host.num_loaded > 0


def test_a_host_cache_smaller_than_a_block_is_refused(make_engine):
    with pytest.raises(ConfigError, match="host_memory_bytes is 100 but a block of 16"):
        make_engine(host_bytes=100)


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "static_batch"])
def test_a_host_cache_without_use_is_refused(make_engine, policy):
    changes = {"host_bytes": HOST_BYTES, "enable_block_reuse": False}
    with pytest.raises(ConfigError, match="Set enable_kv_cache_reuse to True"):
        make_engine(**changes, policy=policy)
    with pytest.raises(ConfigError, match="all layers have windows, of 33 tokens at most"):
        make_engine(**changes, policy="max_utilization", attention_windows=(33,))


@pytest.mark.matrix(keep=5)
@pytest.mark.parametrize(
    "changes",
    [{}, {"depth": 2}, {"max_num_batched_tokens": 23, "depth": 2}, {"host_bytes": 1 << 16}],
    ids=str,
)
@pytest.mark.parametrize("enable_block_reuse", [False, True])
def test_a_preempted_sequence_resumes_with_its_own_blocks(
    make_engine, prompt_of, changes, enable_block_reuse
):
    prompts = [prompt_of(20 + seed, seed) for seed in range(6)]

    def outputs(driver):
        ids = [driver.submit(prompt, max_tokens=90) for prompt in prompts]
        driver.run()
        driver.check_idle()
        return [driver.output(number) for number in ids]

    expected = outputs(make_engine(enable_block_reuse=False))
    small = {**SMALL, "policy": "max_utilization", "expected_output_tokens": 1}
    driver = make_engine(**{**small, **changes}, enable_block_reuse=enable_block_reuse)
    scheduler = driver.engine.scheduler
    host = scheduler.cache.hosts[0]

    for _ in range(2):
        assert outputs(driver) == expected

    assert host.num_loaded > 0
    assert scheduler.preemptions.num_sequences > 0
    assert scheduler.cache.num_reused_blocks == 0 or enable_block_reuse
    if not enable_block_reuse:
        assert host.num_used == 0
        if "host_bytes" not in changes:
            # The partial block of each sequence, and the tokens in flight at its preemption.
            assert scheduler.preemptions.num_tokens < 18 * scheduler.preemptions.num_sequences


def test_a_host_slot_replaced_twice_in_a_step_gets_the_last_content():
    pool = BlockPool(4, HostPool(2))
    for block in pool.allocate(4):
        pool.publish(block, bytes([block]))
    # This content keeps its slot, so that all other content shares one slot.
    pool.retain(bytes([0]), Retention(80))
    pool.release([3, 2, 1, 0])

    pool.allocate(4)

    slot_of = {content: pool.host.lookup(bytes([content])) for content in range(4)}
    assert sorted(pool.take_moves()) == [(b, s) for b, s in slot_of.items() if s is not None]
    assert {block for block, slot in slot_of.items() if slot is not None} == {0, 3}
    assert pool.take_moves() == []


def test_no_step_writes_a_block_or_host_slot_twice(make_engine, prompt_of):
    prompts = [prompt_of(100, seed) for seed in range(4)]
    host_bytes = 3 * 16 * 2 * 2 * 2 * 8 * 4
    driver = make_engine(max_tokens=208, host_bytes=host_bytes, max_num_batched_tokens=256)
    host = driver.engine.scheduler.cache.hosts[0]
    begin, written = driver.engine.runner.execute_model, []

    def note(decision):
        transfers = decision.transfers.tolist()
        written.append([to for kind, _, _, to in transfers if kind == TransferKind.MOVE])
        return begin(decision)

    driver.engine.runner.execute_model = note
    expected = outputs_of(make_engine(enable_block_reuse=False), prompts)

    for _ in range(3):
        assert outputs_of(driver, prompts) == expected

    assert host.num_slots == 3 and host.num_stored > 12
    assert all(len(set(slots)) == len(slots) for slots in written)
