"""What each step computes: admission, chunking, preemption, and taking in the results."""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as List

from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.lora.manager import AdapterManager
from trimaran.worker.requests.request import (
    KEY,
    Request,
    RequestStatus,
    Sequence,
    remove_by_key,
)
from trimaran.worker.sampling.beam_search import Candidates
from trimaran.worker.scheduling.admission_policy import Outlook
from trimaran.worker.scheduling.beam_group import BeamGroup, advance_groups, num_next_tokens
from trimaran.worker.scheduling.capacity import PlaceFinder
from trimaran.worker.scheduling.guided_sequences import Followers
from trimaran.worker.scheduling.limits import check_limits, check_queue
from trimaran.worker.scheduling.resources import Loads, Releases, Rows
from trimaran.worker.scheduling.step_plan import ScheduledStep, StepPlan
from trimaran.worker.scheduling.token_budget import FairChunks, MicroBatches
from trimaran.worker.scheduling.waiting_queue import WaitingQueue

_WATERMARK = 0.01
"""Share of the blocks that admission leaves free for the growth of running sequences."""

Emission = tuple[Sequence, int, FinishReason]
"""A sequence, its next token id or -1 if it only ends, and whether it ends."""


class Scheduler:
    """Decides steps under one token budget and keeps every sequence's place.

    There are no phases: a sequence has known and computed tokens, and a step lets the
    computed ones catch up. A decode is the case of one missing token, a chunk of a prompt
    the case of many. Running sequences come first, then the queue in order of priority and
    arrival; the first that does not fit stops admission, so none is overtaken for ever.

    Steps may be planned before the results of earlier ones are known. All ranks run steps
    in order, so what a later step writes never reaches an earlier one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        adapters: AdapterManager | None = None,
        num_micro_batches: int = 0,
    ) -> None:
        """Without ``adapters`` no request may have one; see `MicroBatches` for the last."""
        self.config = config
        self.cache = cache
        self._adapters = adapters
        self._micro_batches = MicroBatches(num_micro_batches) if num_micro_batches else None
        self.running: list[Sequence] = []
        self._queue = WaitingQueue(cache, adapters)
        self.waiting, self.expected = self._queue.sequences, self._queue.expected
        self.loads = Loads()
        self.step = 0
        self._is_static = config.is_static
        self._batch_size = 0
        """Sequences of the static batch that runs, as it was formed."""
        self._can_preempt = config.can_preempt
        self.rows = Rows(config.max_num_seqs)
        self.releases = Releases(cache)
        self._ended: list[Emission] = []
        self.pauses = self._queue.pauses
        self._outlook = Outlook(config, cache)
        self._followers = Followers()
        self._chunks = FairChunks(config, cache.block_size)
        self._places = PlaceFinder(config, cache)

    # ---- requests ------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Refuse a request that the limits can never admit, or that finds the queue full.

        Raises:
            RequestError: names the value, the limit and the remedy.
        """
        check_limits(request, self.config, self.cache)
        queue = self.waiting, self.expected
        check_queue(request, self.config, [queue], len(self.rows.free))

    def expect(self, request: Request) -> None:
        """Keep its place for a checked request, until it is added, ended or given up."""
        self.expected.add(request)

    def give_up(self, request: Request) -> None:
        """Keep no place any more for a request that was expected."""
        self.expected.discard(request)

    def add(self, request: Request) -> None:
        """Queue a checked request. A replayed one may turn out to be complete."""
        self.expected.discard(request)
        request.start_sequences(len(self.cache.pools))
        self._followers.add(request)
        first = request.sequences[0]
        if request.output_ids:
            reason = first.ends_by(request.output_ids[-1])
            if reason is not FinishReason.NOT_FINISHED:
                self._finish(first, reason)
                self._ended.append((first, -1, reason))
                return
        if request.sampling.beam_width > 1:
            first.beams = BeamGroup(first)
            self._outlook.beams_came()
        self._queue.add(first)

    def end(self, request: Request, reason: FinishReason) -> None:
        """End all of a request's sequences now, by cancellation."""
        self.expected.discard(request)
        if not request.sequences:
            request.start_sequences(len(self.cache.pools))
            self._followers.add(request)
        for sequence in request.sequences:
            if sequence.status is not RequestStatus.FINISHED:
                self._finish(sequence, reason)
                self._ended.append((sequence, -1, reason))

    def take_failed(self) -> list[Request]:
        """Requests with a sequence that no id could go on, once each; all of it has ended."""
        return self._followers.take_failed()

    def take_ended(self) -> list[Emission]:
        """The ends that no step's result brought, once each."""
        ended, self._ended = self._ended, []
        return ended

    def discard_ended(self, source: Hashable) -> None:
        """Forget the ends that a vanished source would have been told."""
        self._ended = [item for item in self._ended if item[0].request.source != source]

    @property
    def has_requests(self) -> bool:
        """Whether any sequence runs or waits, or an end is to be told."""
        return bool(self.running or self.waiting or self.loads or self._ended)

    @property
    def micro_batch(self) -> int:
        """Which of the steps in flight of a pipeline the last one was; 0 without stages."""
        return self.step % self._micro_batches.count if self._micro_batches else 0

    @property
    def num_active(self) -> int:
        """Sequences that run or wait; of beams one, and of a request that is expected."""
        return self._num_in_batch + len(self.waiting) + len(self.expected)

    @property
    def num_preempted(self) -> int:
        """Sequences in the queue that ran before."""
        return self.pauses.num_waiting

    @property
    def num_empty_slots(self) -> int:
        """Sequences of the static batch that have ended before others of it."""
        num_left = self._num_in_batch
        return max(0, self._batch_size - num_left) if self._is_static and num_left else 0

    @property
    def _num_in_batch(self) -> int:
        """Sequences that run, or do as soon as their prefix has come from the host."""
        return len(self.running) + self.loads.num_open

    # ---- planning ------------------------------------------------------------------------

    def schedule(self, *, is_beside_others: bool = False) -> ScheduledStep | None:
        """Decide the next step; None if there is nothing to compute. In other lanes sequences
        may run beside it."""
        can_cut = self.config.enable_chunked_context
        plan = StepPlan(self.step + 1, self.config.max_num_batched_tokens, can_cut=can_cut)
        self.cache.begin_step()
        maker = self._outlook.who_makes_room(self.running, self.waiting, self.loads, plan.step)
        if maker is not None:
            self._preempt(maker)
        self._plan_running(plan)
        if self.loads:
            self._start_loaded(plan, is_urgent=False)
        is_batch_over = not self.running and not self.loads
        if not plan.has_preempted and (is_batch_over or not self._is_static):
            self._admit(plan, is_beside_others)
            self._batch_size = self._num_in_batch
        while self.loads and not plan.has_entries:
            self._start_loaded(plan, is_urgent=True)
            if not plan.has_entries:
                # All of them had been cancelled, which made room for others.
                self._admit(plan, is_beside_others)
                self._batch_size = self._num_in_batch
        self.cache.end_step()
        if not plan.has_entries:
            return None
        if self.cache.hosts:
            plan.add_transfers(self.cache, self.loads.take_wait_step())
        self.step += 1
        self._queue.add_forks(plan.first_samples)
        has_ids = self._micro_batches is not None
        return self._followers.fill(plan.finish(self.rows.take_finished(), has_ids=has_ids))

    def _plan_running(self, plan: StepPlan) -> None:
        """Schedule what the running sequences miss: all, or a share of them in a pipeline."""
        if self._micro_batches is None:
            self._plan_each(self.running, plan)
            return
        is_final = False
        while not is_final:
            picked = self._micro_batches.pick(self.running, plan.step)
            self._plan_each(picked, plan)
            # All that were picked may have made room: then it is others' turn.
            is_final = plan.has_entries or all(sequence.row >= 0 for sequence in picked)

    def _plan_each(self, running: list[Sequence], plan: StepPlan) -> None:
        """Schedule what these running sequences miss, as far as the budget goes."""
        # Ordered by key: whoever is preempted comes later in it than whoever needs room.
        index = 0
        step = plan.step
        while index < len(running) and plan.budget > 0:
            sequence = running[index]
            index += 1
            num_known = len(sequence.token_ids) + sequence.num_pending
            start = sequence.num_computed_tokens
            missing = num_known - start
            # At its length limit it only waits for tokens that are in flight.
            if num_known >= sequence.max_len or missing <= 0:
                continue
            # What may come next is known once the host has seen what came last.
            if sequence.guide is not None and sequence.num_pending:
                continue
            if (
                missing == 1
                and num_known <= sequence.capacity
                and num_known < sequence.publish_at
                and start >= sequence.num_prompt_tokens
            ):
                # `_advance` of nearly every sequence of nearly every step, spelled out.
                plan.add_decode(sequence, start)
                sequence.num_computed_before = start
                sequence.num_computed_tokens = num_known
                sequence.last_step = step
                sequence.num_pending += 1
            elif sequence.row < 0:
                # It made room for one before it, meanwhile.
                continue
            elif num_known > self.cache.switch_at and not sequence.blocks.is_long:
                # All of its keys are to be rotated otherwise from now on.
                self._preempt(sequence)
                index -= running is self.running
            else:
                num_later = num_next_tokens(running[index:]) if missing > 1 else 0
                self._plan_one(sequence, missing, len(running), num_later, plan)

    def _plan_one(
        self, sequence: Sequence, missing: int, num_running: int, num_later: int, plan: StepPlan
    ) -> None:
        """Schedule a running one's next chunk, or its beams; ``num_later`` tokens are those
        of whoever runs behind it."""
        start = sequence.num_computed_tokens
        if sequence.beams is not None and start >= sequence.num_prompt_tokens:
            self._plan_beams(sequence, plan)
            return
        chunk = 1
        if missing > 1:
            budget = plan.budget_for(sequence, num_running - 1, num_later)
            chunk = self._chunk(sequence, missing, budget, num_later)
        if self.cache.window.num_tokens and sequence.is_alone:
            self.cache.leave_behind(sequence.blocks, start)
        if self._make_room(sequence, start + chunk, plan):
            self._advance(sequence, chunk, chunk == missing, plan)

    def _chunk(self, sequence: Sequence, missing: int, budget: int, num_later: int = 0) -> int:
        """Tokens to compute now; ``num_later`` are left to those that run behind it."""
        waiting = self._queue.ready if self.rows.free else []
        return self._chunks.size(sequence, missing, budget - num_later, waiting, self.step + 1)

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Grow a running sequence, preempting others; False if it was preempted itself."""
        if num_tokens <= sequence.capacity:
            return True
        blocks = sequence.blocks
        num_blocks = blocks.num_blocks
        while not self.cache.grow(blocks, num_tokens):
            if self._preempt_last(plan) is sequence:
                return False
        plan.add_blocks(sequence.row, blocks, num_blocks)
        sequence.capacity = blocks.num_blocks * self.cache.block_size
        return True

    def _plan_beams(self, leader: Sequence, plan: StepPlan) -> None:
        """Schedule a token of every beam, all or none, preempting others for room."""
        beams = leader.beams
        assert isinstance(beams, BeamGroup)
        if plan.budget < beams.width:
            return
        while beams.num_needed(self.cache) > self.cache.num_available:
            if self._preempt_last(plan) is leader:
                return
        beams.plan(plan, self.cache)
        leader.num_computed_before = leader.num_computed_tokens
        leader.num_computed_tokens += 1
        leader.last_step = plan.step

    def _preempt_last(self, plan: StepPlan) -> Sequence:
        """Preempt the last running sequence, for room, and return it."""
        assert self._can_preempt, "a sequence outgrew its reservation"
        victim = self.running[-1]
        self._preempt(victim)
        plan.has_preempted = True
        return victim

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue: what was computed is freed, though it may be found again."""
        self._leave_row(sequence)
        self.releases.pause(sequence)
        if sequence.beams is not None:
            sequence.beams.start_over()
        self._queue.add_paused(sequence, self.step)

    def _advance(
        self, sequence: Sequence, chunk: int, is_sampled: bool, plan: StepPlan
    ) -> None:
        start = sequence.num_computed_tokens
        plan.add(sequence, start, chunk, is_sampled)
        sequence.num_computed_before = start
        sequence.num_computed_tokens = start + chunk
        sequence.last_step = plan.step
        if is_sampled and sequence.beams is not None:
            sequence.beams.awaited_step = plan.step
        elif is_sampled:
            sequence.num_pending += 1
        if start + chunk >= sequence.publish_at:
            # Layers write a step's KV before they read any, so it can be shared at once.
            sequence.publish_at = self.cache.publish(sequence.blocks, start + chunk)

    def _admit(self, plan: StepPlan, is_beside_others: bool) -> None:
        self._outlook.begin_admission()
        while self.waiting and self.rows.free and plan.budget > 0:
            sequence = self._queue.next(may_overtake=is_beside_others or bool(self.running))
            # A preempted one comes back when the host knows all of its tokens.
            if sequence is None or sequence.num_pending:
                return
            if not plan.budget_for(sequence, len(self.running)):
                return
            if not self._outlook.has_future(
                sequence, self.running, self.loads, len(self.waiting), plan.step
            ):
                return
            if not self._start(sequence, plan):
                self._chunks.refuse(plan.step)
                return

    def _start(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Admit one sequence with its first chunk, or return False and change nothing."""
        cache, blocks, beams = self.cache, sequence.blocks, sequence.beams
        cache.fit_to(blocks, sequence.token_ids)
        if beams is not None and len(self.rows.free) < beams.width:
            return False
        has_turn = self._outlook.has_turn(sequence)
        is_growing = self._can_preempt and self.running and not has_turn
        place = self._places.find(
            sequence,
            plan.step,
            can_grow_later=self._can_preempt,
            num_kept=int(cache.num_blocks * _WATERMARK) if is_growing else 0,
        )
        if place is None:
            return False
        missing = len(sequence.token_ids) - place.num_cached
        can_wait = missing <= self.config.max_num_batched_tokens
        if missing > plan.budget and can_wait and not self.config.enable_chunked_context:
            return False
        adapters, number = self._adapters, sequence.request.adapter_id
        if adapters is not None and not adapters.make_ready(number):
            return False
        copies = place.take(sequence, cache, is_reserved=not self._can_preempt)
        chunk = self._chunk(sequence, missing, plan.budget_for(sequence, len(self.running)))
        has_room = cache.grow(blocks, place.num_cached + chunk)
        assert has_room, "a sequence was admitted without room for its first chunk"
        sequence.capacity = blocks.num_blocks * cache.block_size
        self._take_row(sequence)
        if blocks.load:
            self.loads.add(sequence, plan.step)
            return True
        insort(self.running, sequence, key=KEY)
        plan.add_row(sequence, copies)
        self._advance(sequence, chunk, chunk == missing, plan)
        return True

    def _start_loaded(self, plan: StepPlan, *, is_urgent: bool) -> None:
        """Let those run whose prefix has come from the host.

        With ``is_urgent`` the first runs in any case: the device waits for its copies.
        """
        while plan.budget > 0:
            sequence = self.loads.take(self.cache, is_urgent=is_urgent)
            if sequence is None:
                return
            if sequence.status is RequestStatus.FINISHED:
                self.rows.give_back(sequence)
                self.releases.release_later(sequence)
                continue
            is_urgent = False
            insort(self.running, sequence, key=KEY)
            start = sequence.num_computed_tokens
            missing = len(sequence.token_ids) - start
            chunk = self._chunk(sequence, missing, plan.budget)
            chunk = min(chunk, sequence.capacity - start)
            plan.add_row(sequence, [])
            self._advance(sequence, chunk, chunk == missing, plan)

    def _take_row(self, sequence: Sequence) -> None:
        self._queue.start(sequence)
        self.rows.take(sequence)
        sequence.status = RequestStatus.RUNNING
        sequence.publish_at = 0

    def _leave_row(self, sequence: Sequence) -> None:
        remove_by_key(self.running, sequence)
        self.rows.leave(sequence)

    # ---- results -------------------------------------------------------------------------

    def update_from_output(
        self,
        step: ScheduledStep,
        token_ids: Iterable[int],
        candidates: List[Candidates] = (),
    ) -> list[Emission]:
        """Take in one step's sampled ids, in order of the step's ``sampled`` sequences.

        ``candidates`` are those of the beams among them, in order; their ids mean nothing.
        What a sequence sampled that has ended meanwhile is dropped.
        """
        emitted: list[Emission] = []
        not_finished = FinishReason.NOT_FINISHED
        pairs: Iterable[tuple[Sequence, int]] = zip(step.sampled, token_ids, strict=True)
        if candidates:
            for group in advance_groups(step, candidates, self.cache):
                if group.search.is_over:
                    self._finish(group.leader, group.finish_reason)
                emitted.append((group.leader, -1, group.finish_reason))
            pairs = [pair for pair in pairs if pair[0].beams is None]
        for sequence, token_id in pairs:
            sequence.num_pending -= 1
            if sequence.status is RequestStatus.FINISHED:
                continue
            if token_id == sequence.end_id:
                self._finish(sequence, FinishReason.END_ID)
                emitted.append((sequence, -1, FinishReason.END_ID))
                continue
            sequence.token_ids.append(token_id)
            reason = not_finished
            if sequence.stop_words or len(sequence.token_ids) >= sequence.look_at:
                if not self._followers.accept(sequence, token_id, self._finish):
                    continue
                reason = self._look_at(sequence, token_id)
            emitted.append((sequence, token_id, reason))
        self.releases.step_done(step.decision.step)
        return emitted

    def _look_at(self, sequence: Sequence, token_id: int) -> FinishReason:
        """Hash a block that the new token fills, and end the sequence if it does."""
        num_known, block_size = len(sequence.token_ids), self.cache.block_size
        if num_known % block_size == 0:
            self.cache.extend_hashes(sequence.blocks, sequence.token_ids)
        next_end = (num_known // block_size + 1) * block_size
        is_always = sequence.request.may_get_stuck
        sequence.look_at = 0 if is_always else min(sequence.max_len, next_end)
        reason = sequence.ends_by(token_id)
        if reason is not FinishReason.NOT_FINISHED:
            self._finish(sequence, reason)
        return reason

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._followers.remove(sequence)
        if sequence.blocks.load:
            # Its blocks are being written: `_start_loaded` frees them.
            sequence.status, sequence.finish_reason = RequestStatus.FINISHED, reason
            return
        if sequence.status is RequestStatus.WAITING:
            self._queue.drop(sequence)
        is_running = sequence.status is RequestStatus.RUNNING
        sequence.status = RequestStatus.FINISHED
        sequence.finish_reason = reason
        self._outlook.ended(sequence, reason)
        if is_running:
            self._leave_row(sequence)
            self.releases.release_later(sequence)
