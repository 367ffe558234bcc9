"""Sequences whose prefix is being copied from the host, step by step, without a model."""

from array import array

import pytest

from trimaran.comm.messages.messages import FinishReason
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import Request
from trimaran.worker.scheduling.scheduler import Scheduler
from trimaran.worker.steps.step_types import TransferKind

BLOCK = 4
PROMPTS = [range(100 * number, 100 * number + 30) for number in range(1, 7)]
FIRST = PROMPTS[0]


class Planner:
    """A scheduler with a host pool whose steps are answered with made-up ids."""

    def __init__(self, num_blocks=32, **limits):
        values = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "max_seq_len": 64}
        config = SchedulerConfig(**{**values, "policy": "max_utilization", **limits})
        self.cache = KVCacheManager([num_blocks], BLOCK, enable_reuse=True, host_slots=32)
        self.scheduler = Scheduler(config, self.cache)
        self.requests: list[Request] = []

    def add(self, prompt, max_tokens=2, priority=0, **sampling) -> Request:
        request = Request(
            source="client",
            request_id=len(self.requests),
            number=len(self.requests),
            prompt_ids=array("i", prompt),
            priority=priority,
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        )
        self.scheduler.check(request)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self):
        """Plan one step and answer the step; returns its transfers by kind."""
        scheduler = self.scheduler
        step = scheduler.schedule()
        self.cache.check([s.blocks for r in self.requests for s in r.sequences])
        if step is None:
            return None
        scheduler.update_from_output(step, [7] * len(step.sampled))
        scheduler.take_ended()
        transfers = step.decision.transfers.tolist()
        return {kind: [row[1:] for row in transfers if row[0] == kind] for kind in TransferKind}

    def run(self):
        while self.scheduler.has_requests:
            self.step()

    def check_empty(self):
        assert not self.scheduler.has_requests
        self.cache.check([])
        assert self.cache.num_free == self.cache.num_available == self.cache.num_blocks
        assert len(self.scheduler.rows.free) == self.scheduler.config.max_num_seqs


@pytest.fixture(params=["max_utilization", "guaranteed_no_evict"])
def planner(request):
    """A planner with the first prompt in its host cache, and later prompts on the device."""
    planner = Planner(policy=request.param)
    for prompt in PROMPTS:
        planner.add(prompt)
        planner.run()
    assert planner.cache.hosts[0].num_stored > 0
    return planner


def test_other_sequences_run_during_copies_from_the_host(planner):
    busy = planner.add(range(5), max_tokens=20)
    planner.step()
    waiting = planner.add(FIRST)
    loads = planner.step()[TransferKind.LOAD]
    load_step = planner.scheduler.step
    for _ in range(5):
        assert planner.step()[TransferKind.WAIT] == []
    assert busy.sequences[0].num_output_tokens == 7
    assert waiting.sequences[0].num_output_tokens == 0

    planner.scheduler.swap_ins.done_step = load_step
    transfers = planner.step()

    assert transfers[TransferKind.WAIT] == [[load_step, 0, 0]]
    assert waiting.sequences[0].num_output_tokens == 1
    blocks = waiting.sequences[0].blocks.tables[0]
    assert loads
    assert {block for _, _, block in loads} <= set(blocks)
    planner.run()
    planner.check_empty()


def test_a_step_waits_for_copies_from_the_host_if_no_other_sequence_runs(planner):
    request = planner.add(FIRST)

    transfers = planner.step()

    assert transfers[TransferKind.LOAD]
    assert transfers[TransferKind.WAIT] == [[planner.scheduler.step, 0, 0]]
    assert request.sequences[0].num_output_tokens == 1
    planner.run()
    planner.check_empty()


def test_a_prefix_in_transfer_from_the_host_is_loaded_once_and_then_shared(planner):
    planner.add(range(5), max_tokens=20)
    planner.step()
    twins = [planner.add(FIRST), planner.add(FIRST)]
    num_loads = len(planner.step()[TransferKind.LOAD])
    assert num_loads > 0
    assert planner.step()[TransferKind.LOAD] == []

    planner.scheduler.swap_ins.done_step = planner.scheduler.step
    assert planner.step()[TransferKind.LOAD] == []

    assert [twin.sequences[0].num_output_tokens for twin in twins] == [1, 1]
    planner.run()
    planner.check_empty()


def test_blocks_of_a_cancelled_transfer_are_freed_after_the_transfer(planner):
    planner.add(range(5), max_tokens=20)
    planner.step()
    waiting = planner.add(FIRST)
    planner.step()
    load_step, num_free = planner.scheduler.step, planner.cache.num_free

    planner.scheduler.end(waiting, FinishReason.CANCELLED)
    planner.step()
    assert planner.cache.num_free == num_free
    planner.scheduler.swap_ins.done_step = load_step

    # Copies of other ranks may still be in flight: the decision tells the ranks to wait.
    assert planner.step()[TransferKind.WAIT] == [[load_step, 0, 0]]
    assert planner.cache.num_free > num_free
    planner.run()
    planner.check_empty()


def test_cancelling_all_requests_during_transfers_leaves_nothing(planner):
    busy = planner.add(range(5), max_tokens=20)
    planner.step()
    waiting = planner.add(FIRST)
    planner.step()
    for request in (busy, waiting):
        planner.scheduler.end(request, FinishReason.CANCELLED)
    planner.scheduler.take_ended()

    assert planner.step() is None

    planner.check_empty()


def test_a_sibling_shares_no_block_in_transfer_with_its_parent():
    planner = Planner(num_blocks=13, max_num_seqs=2, expected_output_tokens=1)
    urgent = planner.add(range(5), max_tokens=40, priority=1)
    twins = planner.add(FIRST, max_tokens=20, num_return_sequences=2)
    # The parent has its row first, is preempted for lack of blocks, and resumes.
    while not urgent.is_finished:
        planner.step()
    assert planner.scheduler.preemptions.num_sequences > 0

    while not (transfers := planner.step())[TransferKind.LOAD]:
        assert planner.scheduler.has_requests
    loaded = {block for _, _, block in transfers[TransferKind.LOAD]}
    users = [s for s in planner.scheduler.running if loaded & set(s.blocks.tables[0])]

    assert transfers[TransferKind.WAIT] or not users
    planner.run()
    assert [s.num_output_tokens for s in twins.sequences] == [20, 20]
    planner.check_empty()


def test_ended_sequences_of_a_static_batch_count_as_empty_slots():
    static = Planner(policy="static_batch")
    for prompt in PROMPTS:
        static.add(prompt)
        static.run()
    scheduler, empty = static.scheduler, []
    static.add(range(5), max_tokens=3)
    loading = static.add(FIRST, max_tokens=9)
    cancelled = static.add(PROMPTS[1], max_tokens=9)
    static.step()
    assert len(list(scheduler.swap_ins)) == 2

    empty.append(scheduler.num_empty_slots)
    scheduler.end(cancelled, FinishReason.CANCELLED)
    empty.append(scheduler.num_empty_slots)
    scheduler.swap_ins.done_step = scheduler.step
    while scheduler.has_requests:
        static.step()
        empty.append(scheduler.num_empty_slots)

    assert loading.sequences[0].num_output_tokens == 9
    # One sequence is cancelled before the other sequences have run for two steps, and one
    # sequence has three steps to go.
    assert empty == [0, 1, 1, *[2] * 7, 0]
