"""The dp rank of a request, and the decisions and results of the dp ranks in a step."""

from __future__ import annotations

from array import array

import pytest

from trimaran.comm.errors import ProtocolError, RequestError
from trimaran.comm.messages.messages import FinishReason
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import Request
from trimaran.worker.scheduling.data_parallel import DataParallelScheduler
from trimaran.worker.scheduling.scheduler import Scheduler
from trimaran.worker.steps.data_parallel_decisions import DataParallelDecisions
from trimaran.worker.steps.step_types import SampledTokens, SchedulerOutput

BLOCK = 4


class Planner:
    """Data-parallel ranks whose steps are answered with made-up ids."""

    def __init__(self, num_dp_ranks=2, num_blocks=64, **limits):
        values = {
            "max_num_batched_tokens": 32, "max_num_seqs": 8, "max_seq_len": 256,
            "max_input_len": 255, "policy": "max_utilization", **limits,
        }  # fmt: skip
        config = SchedulerConfig(**values)
        caches = [
            KVCacheManager([num_blocks], BLOCK, enable_reuse=True) for _ in range(num_dp_ranks)
        ]
        self.scheduler = DataParallelScheduler([Scheduler(config, cache) for cache in caches])
        self.count = 0

    def add(self, num_prompt=4, prompt=None, **fields) -> Request:
        request = self.check(num_prompt, prompt, **fields)
        self.scheduler.add(request)
        return request

    def check(
        self, num_prompt=4, prompt=None, priority=0, has_adapter=False, **sampling
    ) -> Request:
        ids = prompt or [(self.count * 37 + place) % 1000 for place in range(num_prompt)]
        request = Request(
            source="client",
            request_id=self.count,
            number=self.count,
            prompt_ids=array("i", ids),
            output_ids=array("i"),
            priority=priority,
            has_adapter=has_adapter,
            sampling=SamplingParams(**{"max_tokens": 3, **sampling}),
        )
        self.count += 1
        self.scheduler.check(request)
        return request

    def step(self, token_id=500):
        """Plan and answer one step; returns the requests that ended."""
        step = self.scheduler.schedule()
        sampled = SampledTokens(
            token_ids=[],
            by_dp_rank=[
                SampledTokens(token_ids=[token_id] * len(rank.sampled))
                for rank in step.ranks
                if rank is not None
            ],
        )
        emitted = []
        for part, told in step.parts(sampled):
            emitted += self.scheduler.update_from_output(part, told.token_ids)
        emitted += self.scheduler.take_ended()
        return [(s.request.number, reason) for s, _, reason in emitted if reason]


def test_requests_go_to_the_dp_rank_with_the_fewest_sequences():
    planner = Planner(num_dp_ranks=3)

    dp_ranks = [planner.add().dp_rank for _ in range(6)]

    assert dp_ranks == [0, 1, 2, 0, 1, 2]


def test_a_prompt_goes_to_the_dp_rank_with_its_prefix_unless_this_rank_is_much_busier():
    planner = Planner()
    prompt = list(range(20))
    first = planner.add(prompt=prompt)
    planner.add()
    while planner.scheduler.has_requests:
        planner.step()

    again = [planner.add(prompt=[*prompt, number]).dp_rank for number in range(4)]

    assert first.dp_rank == 0
    # A lead of two sequences over the other dp rank is within the limit.
    assert again == [0, 0, 0, 1]


def test_a_prompt_with_an_adapter_ignores_prefixes_computed_without_the_adapter():
    planner = Planner()
    prompt = list(range(20))
    planner.add(prompt=prompt)
    while planner.scheduler.has_requests:
        planner.step()
    planner.add(prompt=prompt)

    assert planner.check(prompt=prompt).dp_rank == 0
    assert planner.check(prompt=prompt, has_adapter=True).dp_rank == 1


def test_each_busy_dp_rank_has_its_own_step_and_idle_dp_ranks_have_none():
    planner = Planner()
    planner.add(8)

    alone = planner.scheduler.schedule()
    planner.add(6)
    planner.add(5)
    both = planner.scheduler.schedule()

    assert [rank is None for rank in alone.ranks] == [False, True]
    assert alone.num_context_tokens == 8
    assert (both.num_scheduled, both.num_context_tokens) == (3, 11)
    assert [rank.decision.step for rank in both.ranks] == [2, 1]
    assert both.decision.step == 2


def test_dp_ranks_process_their_own_results_and_report_every_end():
    planner = Planner()
    ends = []
    for _ in range(3):
        planner.add()
    while planner.scheduler.has_requests:
        ends += planner.step()

    assert sorted(ends) == [(number, FinishReason.LENGTH) for number in range(3)]
    assert not planner.scheduler.running
    assert all(rank.cache.num_free == 64 for rank in planner.scheduler.ranks)


def test_a_cancelled_request_ends_in_its_dp_rank():
    planner = Planner()
    requests = [planner.add() for _ in range(4)]
    planner.step()

    planner.scheduler.end(requests[1], FinishReason.CANCELLED)

    assert [s.request.number for s in planner.scheduler.running] == [0, 2, 3]
    assert [s.request.number for s, _, _ in planner.scheduler.take_ended()] == [1]


def test_waiting_requests_of_all_dp_ranks_count_towards_the_queue_limit():
    planner = Planner(max_num_seqs=1, max_queue_size=2)
    for _ in range(4):
        planner.add()

    with pytest.raises(RequestError, match="Maximum queue size of 2"):
        planner.add()


class CountedKey(tuple):
    """A sequence's key, whose comparisons are counted."""

    num_looks = 0

    def __lt__(self, other):
        CountedKey.num_looks += 1
        return super().__lt__(other)


@pytest.mark.parametrize("limits", [{"max_queue_size": 999}, {"level_queue_sizes": (999, 99)}])
def test_the_cost_of_checking_a_request_is_independent_of_the_queue_length(limits):
    planner = Planner(num_dp_ranks=3, max_num_seqs=1, **limits)
    for number in range(300):
        planner.add(priority=-1 - number % 10 // 9)
    for sequence in planner.scheduler.waiting:
        sequence.key = CountedKey(sequence.key)

    CountedKey.num_looks = 0
    planner.check(priority=-1)

    # Two binary searches in each dp rank.
    assert CountedKey.num_looks <= 3 * 2 * 8


def test_requests_with_pending_guides_count_in_their_dp_ranks_and_queues():
    planner = Planner(max_num_seqs=1, level_queue_sizes=(2, 1))
    requests = []
    for priority in (-1, -1, -2, -1, -1):
        requests.append(planner.check(priority=priority))
        planner.scheduler.expect(requests[-1])

    assert [request.dp_rank for request in requests] == [0, 1, 0, 1, 0]
    assert planner.scheduler.num_active == 5
    for priority, limit in ((-1, 2), (-2, 1)):
        with pytest.raises(RequestError, match=f"Maximum queue size of {limit}"):
            planner.check(priority=priority)
    planner.scheduler.give_up(requests[0])
    planner.scheduler.end(requests[1], FinishReason.CANCELLED)
    planner.scheduler.add(requests[3])
    assert planner.scheduler.num_active == 3
    for _ in range(2):
        planner.scheduler.expect(planner.check(priority=-1))
    with pytest.raises(RequestError, match="Maximum queue size of 2"):
        planner.check(priority=-1)


def test_decisions_survive_encoding_for_other_ranks():
    planner = Planner(num_dp_ranks=3)
    planner.add(7)
    planner.add(5)
    decision = planner.scheduler.schedule().decision

    payload = decision.encode()
    found = DataParallelDecisions.decode(payload)

    assert DataParallelDecisions.is_encoded(payload)
    assert not DataParallelDecisions.is_encoded(decision.by_dp_rank[0].encode())
    assert found.step == decision.step
    assert [None if rank is None else rank.encode() for rank in found.by_dp_rank] == [
        decision.by_dp_rank[0].encode(), decision.by_dp_rank[1].encode(), None,
    ]  # fmt: skip
    with pytest.raises(ProtocolError, match="cannot decode the dp ranks' decisions of 3 bytes"):
        DataParallelDecisions.decode(b"abc")
    assert isinstance(found.by_dp_rank[0], SchedulerOutput)
