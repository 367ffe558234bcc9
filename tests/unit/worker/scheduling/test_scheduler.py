"""The scheduler's decisions, step by step, without a model."""

from array import array

import pytest

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import FinishReason
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import Request
from trimaran.worker.scheduling.scheduler import Scheduler

BLOCK = 4


class Planner:
    """A scheduler whose steps are answered with made-up ids."""

    def __init__(self, num_blocks=64, enable_reuse=True, host_slots=0, **limits):
        values = {
            "max_num_batched_tokens": 32,
            "max_num_seqs": 8,
            "max_seq_len": 256,
            "max_input_len": 255,
            "policy": "max_utilization",
            "expected_output_tokens": 1,
            **limits,
        }
        self.config = SchedulerConfig(**values)
        self.cache = KVCacheManager(
            [num_blocks], BLOCK, enable_reuse=enable_reuse, host_slots=host_slots
        )
        self.cache.separates_output = self.config.max_recompute_rows > 0
        self.scheduler = Scheduler(self.config, self.cache)
        self.requests: list[Request] = []
        self.ended: dict[int, FinishReason] = {}

    def add(self, num_prompt=4, *, priority=0, output=(), prompt=None, **sampling) -> Request:
        number = len(self.requests)
        ids = prompt or [(number * 37 + place) % 1000 for place in range(num_prompt)]
        request = Request(
            source="client",
            request_id=number,
            number=number,
            prompt_ids=array("i", ids),
            output_ids=array("i", output),
            priority=priority,
            sampling=SamplingParams(**{"max_tokens": 10, **sampling}),
        )
        self.scheduler.check(request)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def plan(self):
        """Schedule one step; the invariants hold at every one."""
        step = self.scheduler.schedule()
        self.check(step)
        return step

    def answer(self, step, token_id=500):
        """Give every sampled sequence ``token_id``."""
        emitted = self.scheduler.update_from_output(step, [token_id] * len(step.sampled))
        emitted += self.scheduler.take_ended()
        for sequence, _, reason in emitted:
            if reason:
                self.ended[sequence.request.number] = reason
        self.check(None)
        return emitted

    def step(self, token_id=500):
        """Plan and answer; returns {request number: tokens scheduled}."""
        step = self.plan()
        if step is None:
            return {}
        rows = {s.row: s.request.number for s in self.scheduler.running}
        decision = step.decision
        scheduled = {
            rows[row]: int(count)
            for row, count in zip(decision.rows, decision.num_scheduled_tokens, strict=True)
        }
        self.answer(step, token_id)
        return scheduled

    def check(self, step):
        scheduler = self.scheduler
        held = [s for request in self.requests for s in request.sequences]
        self.cache.check([s.blocks for s in held])
        rows = [s.row for s in (*scheduler.running, *scheduler.swap_ins)]
        assert len(set(rows)) == len(rows) <= self.config.max_num_seqs
        assert set(rows).isdisjoint(scheduler.rows.free)
        assert len(rows) + len(scheduler.rows.free) == self.config.max_num_seqs
        assert [s.key for s in scheduler.running] == sorted(s.key for s in scheduler.running)
        if step is None:
            return
        decision = step.decision
        assert 0 < decision.num_tokens <= self.config.max_num_batched_tokens
        assert (decision.num_scheduled_tokens > 0).all()
        by_row = {s.row: s for s in scheduler.running}
        prompts = [by_row[row].num_prompt_tokens for row in decision.rows.tolist()]
        is_output = decision.num_computed_tokens >= prompts
        is_decode = is_output & (decision.num_scheduled_tokens == 1)
        assert is_decode[: decision.num_decodes].all()
        assert not is_decode[decision.num_decodes :].any()
        for s in scheduler.running:
            assert s.num_computed_tokens <= s.blocks.num_blocks * BLOCK

    def check_empty(self):
        scheduler = self.scheduler
        assert not scheduler.has_requests
        assert scheduler.preemptions.num_waiting == 0
        self.cache.check([])
        assert self.cache.num_free == self.cache.num_blocks


def test_a_step_never_exceeds_its_budget_and_decodes_come_first():
    planner = Planner()
    planner.add(4)
    planner.step()
    planner.add(100)

    assert planner.step() == {0: 1, 1: 28}
    assert planner.step() == {0: 1, 1: 28}


def test_a_chunk_of_an_incomplete_prompt_ends_at_a_block_boundary():
    planner = Planner(max_num_batched_tokens=15, max_num_seqs=2)
    planner.add(40)

    assert [planner.step()[0] for _ in range(4)] == [12, 12, 12, 4]


def test_a_prompt_continues_with_a_budget_of_less_than_a_block():
    planner = Planner(max_num_batched_tokens=8, max_num_seqs=8)
    for _ in range(6):
        planner.add(1, max_tokens=200)
    planner.step()
    planner.add(9)

    chunks = [planner.step()[6] for _ in range(3)]

    assert chunks == [2, 2, 2]


def test_a_late_request_starts_in_the_next_step():
    planner = Planner()
    planner.add(4, max_tokens=200)
    for _ in range(10):
        planner.step()
    planner.add(20)

    step = planner.plan()

    assert [s.request.number for s in step.sampled] == [0, 1]


@pytest.mark.feature("parameter:priority", of="request")
def test_higher_priority_is_admitted_first_then_earlier_arrival():
    planner = Planner(max_num_seqs=1)
    for priority in (0, 5, 5, 1):
        planner.add(4, priority=priority, max_tokens=1)

    order = [next(iter(planner.step())) for _ in range(4)]

    assert order == [1, 2, 3, 0]


@pytest.mark.feature("parameter:batch_scheduler_policy")
def test_the_last_admitted_sequence_is_preempted_when_blocks_run_out_and_resumes():
    planner = Planner(num_blocks=5, enable_reuse=False)
    first, second = planner.add(6, max_tokens=7), planner.add(6, max_tokens=7)
    planner.step()
    for _ in range(3):
        planner.step()
    assert planner.scheduler.preemptions.num_waiting == 1
    assert second.sequences[0].row == -1
    assert second.sequences[0].num_computed_tokens == 0

    while planner.scheduler.has_requests:
        planner.step()

    assert first.sequences[0].num_output_tokens == second.sequences[0].num_output_tokens == 7
    planner.check_empty()


def test_no_sequence_is_admitted_in_a_step_that_preempts():
    planner = Planner(num_blocks=5, enable_reuse=False)
    planner.add(6, max_tokens=7)
    planner.add(6, max_tokens=7)
    for _ in range(3):
        planner.step()
    assert len(planner.scheduler.running) == 2
    planner.add(1, max_tokens=1)

    assert planner.step() == {0: 1}


def test_the_lowest_priority_is_preempted():
    planner = Planner(num_blocks=5, enable_reuse=False)
    planner.add(6, priority=0, max_tokens=7)
    planner.add(6, priority=1, max_tokens=7)
    for _ in range(4):
        planner.step()

    assert [s.request.number for s in planner.scheduler.running] == [1]


def test_short_prompts_start_beside_a_huge_prompt_that_keeps_half_of_each_step():
    planner = Planner(num_blocks=128)
    huge = planner.add(200, max_tokens=2)
    assert planner.step() == {0: 32}
    shorts = [planner.add(6, max_tokens=30).number for _ in range(3)]

    # 16 of 32 tokens for two short prompts; the rest is whole blocks of the huge prompt.
    assert planner.step() == {0: 20, 1: 6, 2: 6}
    first = planner.step()
    assert first[0] >= 16 and first[3] == 6 and first[1] == first[2] == 1
    num_steps = 3
    while huge.number not in planner.ended:
        scheduled = planner.step()
        num_steps += 1
        # Decodes after the huge prompt in the queue continue in every step.
        assert all(scheduled[number] == 1 for number in shorts)
    assert num_steps < 2 * 200 / 32 + 2


def test_huge_prompts_run_one_after_another():
    planner = Planner(num_blocks=128)
    planner.add(100, max_tokens=2)
    planner.step()
    planner.add(100, max_tokens=2)
    assert planner.step() == {0: 32}


def test_a_huge_prompt_gets_whole_steps_while_later_prompts_cannot_start():
    planner = Planner(num_blocks=32, max_num_seqs=2, policy="guaranteed_no_evict")
    planner.add(100, max_tokens=8)
    planner.step()
    planner.add(6, max_tokens=100)
    scheduled = [planner.step() for _ in range(3)]
    # Its blocks are found missing once; then no budget is left free for some steps.
    assert sum(step[0] for step in scheduled) >= 68 - 16
    assert all(step.keys() == {0} for step in scheduled)


@pytest.mark.feature("parameter:batch_scheduler_policy")
def test_guaranteed_no_evict_starts_only_what_surely_fits():
    planner = Planner(num_blocks=6, policy="guaranteed_no_evict")
    # 4 + 8 tokens need 3 blocks; the last token's KV is never computed.
    planner.add(4, max_tokens=9)
    planner.add(4, max_tokens=9)
    planner.add(4, max_tokens=2)

    assert set(planner.step()) == {0, 1}
    while planner.scheduler.has_requests:
        planner.step()
        assert planner.scheduler.preemptions.num_waiting == 0
    assert planner.ended == dict.fromkeys(range(3), FinishReason.LENGTH)
    planner.check_empty()


@pytest.mark.feature("parameter:batch_scheduler_policy", "parameter:gpt_model_type")
@pytest.mark.parametrize("limits", [{"policy": "static_batch"}, {"batching": "V1"}])
def test_a_static_batch_runs_to_its_end_before_the_next_starts(limits):
    planner = Planner(max_num_seqs=2, **limits)
    for max_tokens in (2, 6, 2, 2):
        planner.add(4, max_tokens=max_tokens)

    history = [set(planner.step()) for _ in range(8)]

    assert history == [{0, 1}] * 2 + [{1}] * 4 + [{2, 3}] * 2


@pytest.mark.feature("parameter:enable_chunked_context")
def test_prompts_are_computed_whole_without_chunked_context():
    planner = Planner(enable_chunked_context=False)
    planner.add(20)
    planner.add(20)

    assert planner.step() == {0: 20}
    assert planner.step() == {0: 1, 1: 20}


def test_a_prompt_longer_than_a_step_is_refused_without_chunked_context():
    planner = Planner(enable_chunked_context=False)

    with pytest.raises(RequestError, match=r"33 tokens exceeds the 32 .*chunked context"):
        planner.add(33)


def test_a_request_that_cannot_fit_alone_is_refused():
    planner = Planner(num_blocks=4)
    planner.add(10, max_tokens=7)

    with pytest.raises(RequestError, match=r"need 5 KV cache blocks .* cache has 4"):
        planner.add(10, max_tokens=8)


@pytest.mark.feature("setting:max_queue_size", of="request")
def test_a_full_queue_refuses_and_names_its_size():
    planner = Planner(max_num_seqs=1, max_queue_size=2)
    planner.add(4)
    planner.step()
    planner.add(4)
    planner.add(4)

    with pytest.raises(RequestError, match="Maximum queue size of 2"):
        planner.add(4)
    planner.add(4, output=[3])


@pytest.mark.feature("setting:max_queue_size", of="request")
def test_each_priority_level_has_a_queue_of_its_own():
    planner = Planner(max_num_seqs=1, max_queue_size=1, level_queue_sizes=(2, 1, 0))
    planner.add(4, priority=-2)
    planner.step()
    for _ in range(5):
        planner.add(4, priority=-3)
    planner.add(4, priority=-2)
    for _ in range(2):
        planner.add(4, priority=-1)

    for level, size in ((1, 2), (2, 1)):
        with pytest.raises(RequestError, match=f"queue size of {size} .* by priority level"):
            planner.add(4, priority=-level)
    planner.add(4, priority=-3)


def test_free_rows_are_counted_for_the_most_urgent_priority_level_first():
    planner = Planner(max_num_seqs=3, level_queue_sizes=(1, 1))
    for _ in range(2):
        planner.add(4, priority=-1)
        planner.add(4, priority=-2)

    planner.add(4, priority=-1)
    with pytest.raises(RequestError, match="of 1 has been reached by priority level 2"):
        planner.add(4, priority=-2)


def test_ends_by_end_id_stop_word_and_length():
    planner = Planner()
    planner.add(4, end_id=7)
    planner.add(4, stop_words=((8, 9), (5,)))
    planner.add(4, max_tokens=3)

    steps = [planner.answer(planner.plan(), token_id) for token_id in (8, 9)]
    last = planner.answer(planner.plan(), 7)

    assert all(reason == FinishReason.NOT_FINISHED for _, _, reason in steps[0])
    assert [(s.request.number, token_id) for s, token_id, _ in last] == [(0, -1), (2, 7)]
    assert planner.ended == {
        0: FinishReason.END_ID,
        1: FinishReason.STOP_WORDS,
        2: FinishReason.LENGTH,
    }
    planner.check_empty()


def test_a_stop_word_does_not_reach_back_into_the_prompt():
    planner = Planner()
    planner.add(prompt=[1, 2, 8], stop_words=((8, 9),))

    planner.step(9)

    assert planner.ended == {}


@pytest.mark.parametrize(
    ("output", "fields", "reason"),
    [
        ([5, 6], {"max_tokens": 2}, FinishReason.LENGTH),
        ([5, 6], {"stop_words": ((5, 6),)}, FinishReason.STOP_WORDS),
    ],
)
def test_a_replayed_request_that_was_complete_ends_at_once(output, fields, reason):
    planner = Planner()
    planner.add(4, output=output, **fields)

    assert planner.plan() is None
    ((_, token_id, told),) = planner.scheduler.take_ended()
    assert (token_id, told) == (-1, reason)
    planner.check_empty()


def test_a_cancellation_frees_everything_within_a_step():
    planner = Planner(max_num_seqs=2)
    requests = [planner.add(40), planner.add(20), planner.add(4)]
    planner.step()

    for request in requests:
        planner.scheduler.end(request, FinishReason.CANCELLED)

    assert len(planner.scheduler.take_ended()) == 3
    assert planner.plan() is None
    planner.check_empty()


def test_blocks_of_a_cancelled_request_are_freed_after_its_step_in_flight():
    planner = Planner()
    request = planner.add(20)
    step = planner.plan()
    planner.scheduler.end(request, FinishReason.CANCELLED)
    assert planner.cache.num_free < planner.cache.num_blocks

    assert planner.answer(step)[0][2] == FinishReason.CANCELLED

    planner.check_empty()


def test_a_token_computed_after_the_end_of_a_sequence_is_dropped():
    planner = Planner()
    request = planner.add(4, end_id=7)
    first = planner.plan()
    second = planner.plan()
    planner.answer(first, 7)

    assert planner.answer(second, 8) == []
    assert request.sequences[0].num_output_tokens == 0
    planner.check_empty()


def test_no_step_is_planned_beyond_the_length_limit():
    planner = Planner()
    planner.add(4, max_tokens=2)
    steps = [planner.plan(), planner.plan()]

    assert planner.plan() is None
    for step in steps:
        planner.answer(step)
    planner.check_empty()


def test_siblings_fork_off_the_prompt_once_it_is_computed():
    planner = Planner(enable_reuse=False)
    request = planner.add(10, num_return_sequences=3, max_tokens=2)

    assert planner.step() == {0: 10}
    step = planner.plan()
    decision = step.decision
    assert decision.num_scheduled_tokens.tolist() == [1, 1, 1]
    assert decision.num_computed_tokens.tolist() == [10, 9, 9]
    first = request.sequences[0].blocks.tables[0]
    assert [copy[1] for copy in decision.block_copies.tolist()] == [first[2]] * 2
    assert [s.index for s in step.sampled] == [0, 1, 2]
    planner.answer(step)
    while planner.scheduler.has_requests:
        planner.step()
    assert [s.num_output_tokens for s in request.sequences] == [2, 2, 2]
    planner.check_empty()
