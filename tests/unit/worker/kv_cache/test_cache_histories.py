"""Random histories of sequences: no block is lost, and no block holds KV of another
sequence."""

import random
from array import array

import pytest

from tests.unit.worker.device_memory import DeviceMemory, rows_of
from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import FinishReason
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.kv_cache.free_blocks import Retention
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.kv_cache.sequence_blocks import RetentionPlan
from trimaran.worker.requests.request import Request
from trimaran.worker.sampling.beam_search import Candidates, num_candidates
from trimaran.worker.scheduling.scheduler import Scheduler
from trimaran.worker.scheduling.step_plan import ScheduledStep
from trimaran.worker.steps.step_types import NO_ID

NUM_REQUESTS, END = 40, 8
# The first seeds, and seeds of histories that have failed.
SEEDS = [*range(24), 219, 220, 354, 398, 529, 530, 704, 739]
POLICIES = ["max_utilization", "max_utilization", "guaranteed_no_evict", "static_batch"]


class History:
    """A scheduler and a cache of random sizes, with requests that arrive and end."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        max_num_seqs = rng.choice([2, 3, 5, 8])
        config = SchedulerConfig(
            max_num_batched_tokens=max(max_num_seqs, rng.choice([6, 8, 16, 40])),
            max_num_seqs=max_num_seqs,
            max_seq_len=72,
            max_input_len=60,
            policy=rng.choice(POLICIES),
            enable_chunked_context=rng.random() < 0.8,
            max_beam_width=3,
            expected_output_tokens=rng.choice([1, 20, 1000]),
            tokens_per_read=rng.choice([0.0, 5.0]),
        )
        window = rng.choice([0, 0, 5, 13])
        self.cache = KVCacheManager(
            [rng.choice([14, 20, 30, 60]) for _ in range(rng.choice([1, 2]))],
            rng.choice([2, 4, 8]),
            enable_reuse=rng.random() < 0.65,
            window=window,
            num_sinks=rng.choice([0, 5]) if window else 0,
            host_slots=rng.choice([0, 4, 30, 200]),
            is_reserving=not config.can_preempt,
            switch_at=0 if window else rng.choice([0, 20]),
        )
        # A separate generator keeps the other draws of a seed unchanged.
        draw = random.Random(seed)
        if draw.random() < 0.5:
            share = draw.choice([0.1, 0.5, 1.0])
            self.cache.set_partitions(
                [
                    bytes(draw.random() < share for _ in range(pool.num_blocks))
                    for pool in self.cache.pools
                ]
            )
        num_micro_batches = rng.choice([0, 0, 2, 3])
        self.scheduler = Scheduler(config, self.cache, None, num_micro_batches)
        self.memory = DeviceMemory(self.cache)
        self.depth = num_micro_batches or rng.choice([1, 2, 3])
        self.requests: list[Request] = []
        self.num_made = 0
        self.in_flight: list[tuple[ScheduledStep, list[int], list[Candidates]]] = []
        self.ended: set[tuple[int, int]] = set()
        self.failed: set[int] = set()

    def add(self) -> None:
        rng, number = self.rng, self.num_made
        self.num_made += 1
        length, head = rng.randrange(1, 45), rng.randrange(3)
        ids = [head * 100 + place for place in range(min(length, rng.choice([5, 12, 24])))]
        ids += [500 + rng.randrange(2) for _ in range(length - len(ids))]
        sampling = {"max_tokens": rng.randrange(1, 25), "end_id": rng.choice([-1, END])}
        kind = rng.choice(["one", "one", "one", "several", "beams"])
        if kind == "several":
            sampling["num_return_sequences"] = rng.choice([2, 3])
        elif kind == "beams":
            sampling["beam_width"] = sampling["num_return_sequences"] = rng.choice([2, 3])
        is_replayed = kind == "one" and rng.random() < 0.15
        keeps = RetentionPlan(((0, 8, Retention(rng.choice([0, 90]))),))
        request = Request(
            source="client",
            request_id=number,
            number=number,
            prompt_ids=array("i", ids),
            output_ids=array("i", [7] * rng.randrange(1, 6) if is_replayed else []),
            priority=rng.choice([0, 0, 1]),
            cache_salt=rng.choice([b"", b"tenant"]),
            retention=keeps if rng.random() < 0.2 else None,
            sampling=SamplingParams(
                return_context_logits=rng.random() < 0.1,
                stop_words=((9, 7),) if rng.random() < 0.2 else (),
                bad_words=((3,),) if rng.random() < 0.2 else (),
                **sampling,
            ),
        )
        try:
            self.scheduler.check(request)
        except RequestError:
            return
        self.scheduler.add(request)
        self.requests.append(request)

    def cancel(self) -> None:
        request = self.rng.choice(self.requests)
        self.scheduler.end(request, FinishReason.CANCELLED)

    def step(self) -> None:
        scheduler = self.scheduler
        if self.rng.random() < 0.3:
            scheduler.swap_ins.done_step = scheduler.step
            self.memory.finish_loads(scheduler.step)
        if not scheduler.has_requests and not self.in_flight:
            return
        step = scheduler.schedule()
        self.check()
        if step is not None:
            self.check_step(step)
            self.memory.execute(step, scheduler.running)
            self.in_flight.append((step, *self.sample(step)))
        ends = scheduler.take_ended()
        self.note(ends)
        # An engine that waits for nothing must have work.
        assert self.in_flight or ends or not scheduler.has_requests, "nothing can start"
        if self.in_flight and (step is None or len(self.in_flight) >= self.depth):
            emissions = scheduler.update_from_output(*self.in_flight.pop(0))
            self.failed |= {request.number for request, _ in scheduler.take_failed()}
            self.note(emissions)
            self.check()

    def sample(self, step: ScheduledStep) -> tuple[list[int], list[Candidates]]:
        """Random ids of a step's sequences, and candidates of its beams."""
        rng, decision = self.rng, step.decision
        ids, candidates = [], []
        for sequence, entry in zip(step.sampled, decision.sampled.tolist(), strict=True):
            sampling = sequence.request.sampling
            if sequence.beams is not None:
                found = rng.sample(range(4, 20), num_candidates(sampling))
                log_probs = sorted((-5 * rng.random() for _ in found), reverse=True)
                candidates.append((found, log_probs))
                ids.append(0)
                continue
            is_stuck = sequence.request.may_get_stuck and rng.random() < 0.05
            ids.append(NO_ID if is_stuck else rng.choice([7, 7, 7, END, 9, 9]))
            start = int(decision.num_computed_tokens[entry])
            num_known = start + int(decision.num_scheduled_tokens[entry])
            self.memory.sampled(int(decision.rows[entry]), num_known, ids[-1])
        return ids, candidates

    def note(self, emissions) -> None:
        for sequence, _, reason in emissions:
            place = sequence.request.number, sequence.index
            assert place not in self.ended, "an ended sequence is reported"
            if reason is not FinishReason.NOT_FINISHED:
                self.ended.add(place)

    def check_step(self, step: ScheduledStep) -> None:
        """A step keeps to its budget, and decodes come first."""
        decision, running = step.decision, self.scheduler.running
        assert 0 < decision.num_tokens <= self.scheduler.config.max_num_batched_tokens
        assert (decision.num_scheduled_tokens > 0).all()
        prompts = {row: s.num_prompt_tokens for s in running for row in rows_of(s)}
        num_prompt = [prompts[row] for row in decision.rows.tolist()]
        is_output = decision.num_computed_tokens >= num_prompt
        is_decode = is_output & (decision.num_scheduled_tokens == 1)
        assert is_decode[: decision.num_decodes].all()
        assert not is_decode[decision.num_decodes :].any()
        assert [s.key for s in running] == sorted(s.key for s in running)

    def check(self) -> None:
        held = [s for request in self.requests for s in request.sequences]
        groups = [s.beams for s in held if s.beams is not None]
        held += [beam for group in groups for beam in group.beams[1:]]
        self.cache.check([s.blocks for s in held])

    def check_empty(self) -> None:
        cache, scheduler = self.cache, self.scheduler
        cache.check([])
        assert cache.num_free == cache.num_available == cache.num_blocks
        assert not cache.prefixes.under_way
        if not cache.enable_reuse:
            assert not any(host.num_used for host in cache.hosts)
        assert len(scheduler.rows.free) == scheduler.config.max_num_seqs
        assert scheduler.preemptions.num_waiting == 0
        for request in self.requests:
            places = {(request.number, s.index) for s in request.sequences}
            assert request.number in self.failed or places <= self.ended

    def run(self) -> None:
        for _ in range(300):
            if self.num_made < NUM_REQUESTS and self.rng.random() < 0.35:
                self.add()
            if self.requests and self.rng.random() < 0.05:
                self.cancel()
            self.step()
        for _ in range(3000):
            self.step()
        assert not (self.scheduler.has_requests or self.in_flight)
        self.check_empty()


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize("first", range(4))
def test_every_block_row_and_host_slot_is_freed_and_held_the_right_content(first):
    num_loaded = num_paused = 0
    for seed in SEEDS[first::4]:
        history = History(seed)
        history.run()
        num_loaded += sum(host.num_loaded for host in history.cache.hosts)
        num_paused += history.scheduler.preemptions.num_sequences
    assert num_loaded > 0
    assert num_paused > 0
