"""Random histories of windows, host memory, priorities and cancellations lose no block."""

import random
from array import array

import pytest

from trimaran.comm.errors import RequestError
from trimaran.comm.messages import FinishReason
from trimaran.comm.sampling_params import SamplingParams
from trimaran.worker.config import SchedulerConfig
from trimaran.worker.kv_cache.free_blocks import Retention
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.kv_cache.sequence_blocks import RetentionPlan
from trimaran.worker.request import Request
from trimaran.worker.scheduler import Scheduler

BLOCK, NUM_REQUESTS = 4, 60


class History:
    """A scheduler and a cache of random sizes, and requests that come and go."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        config = SchedulerConfig(
            max_num_batched_tokens=rng.choice([8, 16, 32]),
            max_num_seqs=rng.choice([2, 4, 8]),
            max_seq_len=80,
            max_input_len=70,
            policy=rng.choice(["max_utilization", "guaranteed_no_evict", "static_batch"]),
            expected_output_tokens=rng.choice([1, 1000]),
        )
        self.cache = KVCacheManager(
            [rng.choice([24, 32, 64])],
            BLOCK,
            enable_reuse=rng.choice([True, True, False]),
            window=rng.choice([0, 0, 6, 17]),
            num_sinks=rng.choice([0, 5]),
            host_slots=rng.choice([0, 3, 16, 100]),
            is_reserving=not config.can_preempt,
        )
        self.scheduler = Scheduler(config, self.cache)
        self.depth = rng.choice([1, 2])
        self.requests: list[Request] = []
        self.num_made = 0
        self.in_flight = []

    def add(self) -> None:
        rng, number = self.rng, self.num_made
        self.num_made += 1
        head, length = rng.randrange(4), rng.randrange(1, 60)
        ids = [head * 100 + place for place in range(min(length, 30))]
        ids += [rng.randrange(4) * 10 + 500 for _ in range(max(0, length - 30))]
        keeps = RetentionPlan(((0, 8, Retention(rng.choice([0, 90]))),))
        request = Request(
            source="client",
            request_id=number,
            number=number,
            prompt_ids=array("i", ids),
            priority=rng.choice([0, 0, 1]),
            retention=keeps if rng.random() < 0.3 else None,
            sampling=SamplingParams(
                max_tokens=rng.randrange(1, 20), num_return_sequences=rng.choice([1, 1, 1, 2])
            ),
        )
        try:
            self.scheduler.check(request)
        except RequestError:
            return
        self.scheduler.add(request)
        self.requests.append(request)

    def step(self) -> None:
        scheduler, rng = self.scheduler, self.rng
        if rng.random() < 0.4:
            scheduler.loads.done_step = scheduler.step
        if not scheduler.has_requests and not self.in_flight:
            return
        step = scheduler.schedule()
        self.check()
        if step is not None:
            self.in_flight.append(step)
        has_ended = bool(scheduler.take_ended())
        # An engine that waits for nothing has something to do.
        assert self.in_flight or has_ended or not scheduler.has_requests
        if self.in_flight and (step is None or len(self.in_flight) >= self.depth):
            oldest = self.in_flight.pop(0)
            ids = [rng.choice([7, 8, 9]) for _ in oldest.sampled]
            scheduler.update_from_output(oldest, ids)
            self.check()

    def check(self) -> None:
        self.cache.check([s.blocks for r in self.requests for s in r.sequences])

    def check_empty(self) -> None:
        assert not self.scheduler.has_requests
        self.cache.check([])
        if not self.cache.enable_reuse:
            assert not any(host.num_used for host in self.cache.hosts)
        assert self.cache.num_free == self.cache.num_available == self.cache.num_blocks
        assert len(self.scheduler.rows.free) == self.scheduler.config.max_num_seqs


@pytest.mark.parametrize("first", range(0, 36, 12))
def test_every_block_row_and_slot_comes_back(first):
    num_loaded = 0
    for seed in range(first, first + 12):
        history = History(seed)
        for _ in range(300):
            if history.num_made < NUM_REQUESTS and history.rng.random() < 0.35:
                history.add()
            if history.requests and history.rng.random() < 0.08:
                request = history.rng.choice(history.requests)
                history.scheduler.end(request, FinishReason.CANCELLED)
            history.step()
        for _ in range(1000):
            history.step()
        history.check_empty()
        num_loaded += sum(host.num_loaded for host in history.cache.hosts)
    assert num_loaded > 0
