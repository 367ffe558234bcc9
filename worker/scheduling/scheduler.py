"""The scheduler: what each step computes, which sequences it preempts, and its results."""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as List

from trimaran.comm.errors import RequestError
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
from trimaran.worker.scheduling.admission_policy import Batch, policy_of
from trimaran.worker.scheduling.beam_group import BeamGroup, advance_groups, num_next_tokens
from trimaran.worker.scheduling.capacity import CapacityCheck, check_limits
from trimaran.worker.scheduling.draft_rows import DraftRows
from trimaran.worker.scheduling.guided_sequences import GuidedSequences
from trimaran.worker.scheduling.resources import DeferredFrees, Rows
from trimaran.worker.scheduling.step_plan import Emission, ScheduledStep, StepPlan
from trimaran.worker.scheduling.token_budget import ChunkedPrefill, MicroBatches
from trimaran.worker.scheduling.token_intake import TokenIntake
from trimaran.worker.scheduling.waiting_queue import check_queue
from trimaran.worker.speculation.draft_counts import DraftCounts


class Scheduler:
    """Decides steps under one token budget.

    There are no prefill and decode phases. A sequence has known tokens and computed tokens, and
    each step lets the computed ones catch up: a decode is one missing token, a chunk of a
    prompt is many. Running sequences come first. Then the admission policy starts waiting ones.

    A step may be planned before the results of earlier ones are known. All ranks run steps in
    order, so a later step's writes never reach an earlier step.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        adapters: AdapterManager | None = None,
        num_micro_batches: int = 0,
    ) -> None:
        """Without ``adapters`` no request may have one. A pipeline has ``num_micro_batches``
        steps in flight, each with other sequences; 0 means no pipeline.

        Raises:
            ConfigError: the configured admission policy does not exist.
        """
        self.config = config
        self.cache = cache
        self.step = 0
        """Steps decided so far."""
        self.policy = policy_of(config)(config, cache, adapters)
        """Owns the waiting sequences; decides which of them start, and the victims for them."""
        queue = self.policy.queue
        self.waiting, self.expected = queue.sequences, queue.expected
        self.preemptions = queue.preemptions
        self.batch = Batch()
        self.running, self.swap_ins = self.batch.running, self.batch.swap_ins
        self.rows = Rows(config.max_num_seqs)
        self.deferred_frees = DeferredFrees(cache)
        self._adapters = adapters
        self._capacity = CapacityCheck(config, cache)
        leaves_room = config.enable_chunked_context and not self.policy.whole_batches
        self._chunked_prefill = ChunkedPrefill(cache.block_size, leaves_room=leaves_room)
        self._micro_batches = MicroBatches(num_micro_batches) if num_micro_batches else None
        self._guided = GuidedSequences()
        self.wait_for_masks = self._guided.wait
        self.draft_rows: DraftRows | None = None
        if config.speculation.is_on:
            self.draft_rows = DraftRows(config, cache, has_stages=num_micro_batches > 0)
        if self.draft_rows is not None:
            self._guided.propose = self.draft_rows.propose
        self._intake = TokenIntake(cache, self._guided, self._finish)
        self._ended: list[Emission] = []
        """Ends that no step's result brings."""
        self._batch_size = 0
        """Sequences of the batch after the last admission."""

    # ---- requests ------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Refuse a request that the limits can never admit, or that finds the queue full.

        Raises:
            RequestError: names the value, the limit and the remedy.
        """
        check_limits(request, self.config, self.cache)
        check_queue(request, self.config, [self.policy.queue], len(self.rows.free))

    def expect(self, request: Request) -> None:
        """Count a checked request as waiting until it is added, ended or given up."""
        self.expected.add(request)

    def give_up(self, request: Request) -> None:
        """Count a request that was expected no more."""
        self.expected.discard(request)

    def add(self, request: Request) -> None:
        """Queue a checked request. A replayed request may turn out to be complete."""
        self.expected.discard(request)
        request.start_sequences(len(self.cache.pools))
        self._guided.add(request)
        first = request.sequences[0]
        if request.output_ids:
            reason = first.ends_by(request.output_ids[-1])
            if reason is not FinishReason.NOT_FINISHED:
                self._finish(first, reason)
                self._ended.append((first, -1, reason))
                return
        if request.sampling.beam_width > 1:
            first.beams = BeamGroup(first)
        self.policy.add(first)

    def end(self, request: Request, reason: FinishReason) -> None:
        """End all of a request's sequences now: it was cancelled."""
        self.expected.discard(request)
        if not request.sequences:
            request.start_sequences(len(self.cache.pools))
            self._guided.add(request)
        for sequence in request.sequences:
            if sequence.status is not RequestStatus.FINISHED:
                self._finish(sequence, reason)
                self._ended.append((sequence, -1, reason))

    def take_failed(self) -> list[tuple[Request, RequestError]]:
        """Requests without a next id, or with a slow guide, once each; all of it has ended."""
        return self._guided.take_failed()

    def take_ended(self) -> list[Emission]:
        """The ends that no step's result brought, once each."""
        ended, self._ended = self._ended, []
        return ended

    def discard_ended(self, source: Hashable) -> None:
        """Forget the ends that were to be sent to a connection that is gone."""
        self._ended = [item for item in self._ended if item[0].request.source != source]

    @property
    def has_requests(self) -> bool:
        """Whether any sequence runs or waits, or an end is to be sent."""
        return bool(self.running or self.waiting or self.swap_ins or self._ended)

    @property
    def draft_counts(self) -> DraftCounts:
        """Draft tokens since the start."""
        return DraftCounts() if self.draft_rows is None else self.draft_rows.counts

    @property
    def needs_results(self) -> bool:
        """Whether to await the results of all steps before the next `schedule`."""
        return self.draft_rows is not None and self.draft_rows.needs_results(self.running)

    @property
    def micro_batch(self) -> int:
        """The last step's place among the steps in flight of a pipeline; 0 without one."""
        return self.step % self._micro_batches.count if self._micro_batches else 0

    @property
    def num_active(self) -> int:
        """Sequences that run, wait or are expected; beams of one request count once."""
        return self.batch.num_sequences + len(self.waiting) + len(self.expected)

    @property
    def num_empty_slots(self) -> int:
        """Sequences of a static batch that have ended before others of it."""
        num_left = self.batch.num_sequences if self.policy.whole_batches else 0
        return max(0, self._batch_size - num_left) if num_left else 0

    # ---- run: schedule -------------------------------------------------------------------

    def schedule(self, *, is_beside_others: bool = False) -> ScheduledStep | None:
        """Decide the next step; None if there is nothing to compute.

        ``is_beside_others`` says that other data-parallel ranks have running sequences.
        """
        self._ended += self._guided.receive(self._finish)
        can_cut = self.config.enable_chunked_context
        plan = StepPlan(
            self.step + 1,
            self.config.max_num_batched_tokens,
            can_cut=can_cut,
            max_recompute_rows=self.config.max_recompute_rows,
        )
        if self.draft_rows is not None:
            self.draft_rows.begin()
        self.batch.step = plan.step
        self.cache.begin_step()
        victim = self.policy.victim(self.batch)
        if victim is not None:
            self._preempt(victim)
        self._plan_running(plan)
        if self.swap_ins:
            self._start_swapped_in(plan, is_urgent=False)
        is_batch_over = not self.running and not self.swap_ins
        if not plan.has_preempted and (is_batch_over or not self.policy.whole_batches):
            self._admit(plan, is_beside_others)
        while self.swap_ins and not plan.has_entries:
            self._start_swapped_in(plan, is_urgent=True)
            if not plan.has_entries:
                # All of them had been cancelled, so there is room for others.
                self._admit(plan, is_beside_others)
        if self.draft_rows is not None and plan.has_entries:
            self.draft_rows.extend(plan)
        self.cache.end_step()
        if not plan.has_entries:
            return None
        if self.cache.hosts:
            plan.add_transfers(self.cache, self.swap_ins.take_wait_step())
        self.step += 1
        self.policy.add_forks(plan.first_samples)
        has_ids = self._micro_batches is not None
        step = plan.finish(self.rows.take_finished(), has_ids=has_ids)
        if self.draft_rows is not None and self.draft_rows.path_moves is not None:
            step.decision.path_moves = self.draft_rows.path_moves.take()
        return self._guided.fill_masks(step)

    def _plan_running(self, plan: StepPlan) -> None:
        """Schedule what running sequences miss; in a pipeline, a share of the sequences."""
        if self._micro_batches is None:
            self._plan_each(self.running, plan)
            return
        is_final = False
        while not is_final:
            picked = self._micro_batches.pick(self.running, plan.step)
            self._plan_each(picked, plan)
            # If all that were picked have been preempted, others take the step.
            is_final = plan.has_entries or all(sequence.row >= 0 for sequence in picked)

    def _plan_each(self, running: list[Sequence], plan: StepPlan) -> None:
        """Schedule the missing tokens of these running sequences, as far as the budget goes."""
        # In order of keys, so a victim always stands behind the sequence that needs its blocks.
        index = 0
        step = plan.step
        while index < len(running) and plan.budget > 0:
            sequence = running[index]
            index += 1
            num_known = len(sequence.token_ids) + sequence.num_pending
            start = sequence.num_computed_tokens
            missing = num_known - start
            num_ahead = sequence.num_unverified
            # At its length limit a sequence only waits for tokens in flight.
            if num_known + num_ahead >= sequence.max_len or missing <= 0:
                continue
            # A guide allows ids by the last token, which the host must have seen.
            guide = sequence.guide
            if guide is not None and (sequence.num_pending or guide.mask is None):
                continue
            if (
                missing == 1
                and num_known + num_ahead <= sequence.capacity
                and num_known < sequence.publish_at
                and start >= sequence.num_prompt_tokens
            ):
                # `_advance` for nearly every sequence of nearly every step, without its calls.
                # A test proves that both decide alike.
                plan.add_decode(sequence, start)
                sequence.num_computed_before = start
                sequence.num_computed_tokens = num_known
                sequence.last_step = step
                sequence.num_pending += 1
            elif sequence.row < 0:
                # Preempted meanwhile, for a sequence before it.
                continue
            elif num_known > self.cache.switch_at and not sequence.blocks.is_long:
                # All of its keys must be computed again, with the rotation of long contexts.
                self._preempt(sequence)
                index -= running is self.running
            else:
                num_later = num_next_tokens(running[index:]) if missing > 1 else 0
                self._plan_one(sequence, missing, len(running), num_later, plan)

    def _plan_one(
        self, sequence: Sequence, missing: int, num_running: int, num_later: int, plan: StepPlan
    ) -> None:
        """Schedule a running sequence's next chunk, or its beams. ``num_later`` tokens are kept
        for the running sequences behind it."""
        start = sequence.num_computed_tokens
        if sequence.beams is not None and start >= sequence.num_prompt_tokens:
            assert isinstance(sequence.beams, BeamGroup)
            sequence.beams.plan_all(plan, self.cache, self._preempt_last)
            return
        chunk = 1
        if missing > 1:
            budget = plan.budget_for(sequence, num_running - 1, num_later)
            chunk = self._chunk(sequence, missing, budget - num_later, plan)
        if self.cache.window.num_tokens and sequence.is_alone:
            self.cache.free_outside_window(sequence.blocks, start)
        if self._make_room(sequence, start + sequence.num_unverified + chunk, plan):
            self._advance(sequence, chunk, chunk == missing, plan)

    def _chunk(self, sequence: Sequence, missing: int, budget: int, plan: StepPlan) -> int:
        """Tokens of a sequence to compute in this step."""
        missing = plan.with_same_kernels(sequence, missing, len(self.running))
        waiting = self.policy.queue.ready if self.rows.free else []
        return self._chunked_prefill.size(sequence, missing, budget, waiting, self.step + 1)

    def _advance(
        self, sequence: Sequence, chunk: int, is_sampled: bool, plan: StepPlan
    ) -> None:
        """Schedule ``chunk`` tokens of a sequence, for which its blocks have room."""
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

    # ---- run: admission ------------------------------------------------------------------

    def _admit(self, plan: StepPlan, is_beside_others: bool) -> None:
        """Start waiting sequences, in the order and as far as the policy admits them."""
        policy, batch = self.policy, self.batch
        policy.begin_admission(batch)
        while self.waiting and self.rows.free and plan.budget > 0:
            may_overtake = is_beside_others or bool(self.running)
            sequence = policy.queue.next(may_overtake=may_overtake)
            # A preempted sequence resumes when all of its tokens are on the host.
            if sequence is None or sequence.num_pending:
                break
            if not plan.budget_for(sequence, len(self.running)):
                break
            if not policy.admits(sequence, batch):
                break
            if not self._start(sequence, plan):
                self._chunked_prefill.out_of_blocks(plan.step)
                break
        self._batch_size = batch.num_sequences

    def _start(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Start one sequence with its first chunk, or return False and change nothing."""
        cache, blocks, beams = self.cache, sequence.blocks, sequence.beams
        reserves = self.policy.reserves_output
        cache.separate_long_contexts(blocks, sequence.token_ids)
        if beams is not None and len(self.rows.free) < beams.width:
            return False
        allocation = self._capacity.find(
            sequence,
            plan.step,
            can_grow_later=not reserves,
            num_kept=self.policy.watermark(sequence, self.batch),
        )
        if allocation is None:
            return False
        missing = len(sequence.token_ids) - allocation.num_cached
        can_wait = missing <= self.config.max_num_batched_tokens
        if missing > plan.budget and can_wait and not self.config.enable_chunked_context:
            return False
        adapters, number = self._adapters, sequence.request.adapter_id
        if adapters is not None and not adapters.make_ready(number):
            return False
        copies = allocation.take(sequence, cache, is_reserved=reserves)
        budget = plan.budget_for(sequence, len(self.running))
        chunk = self._chunk(sequence, missing, budget, plan)
        has_room = cache.grow(blocks, allocation.num_cached + chunk)
        assert has_room, "a sequence was admitted without room for its first chunk"
        sequence.capacity = blocks.num_blocks * cache.block_size
        self._enter_row(sequence)
        if blocks.load:
            self.swap_ins.add(sequence, plan.step)
            return True
        insort(self.running, sequence, key=KEY)
        plan.add_row(sequence, copies)
        self._advance(sequence, chunk, chunk == missing, plan)
        return True

    def _start_swapped_in(self, plan: StepPlan, *, is_urgent: bool) -> None:
        """Run the sequences whose prefix has come from the host cache.

        With ``is_urgent`` the first one runs in any case: the device waits for its copies.
        """
        while plan.budget > 0:
            sequence = self.swap_ins.take(self.cache, is_urgent=is_urgent)
            if sequence is None:
                return
            if sequence.status is RequestStatus.FINISHED:
                self.rows.give_back(sequence)
                self.deferred_frees.free(sequence)
                continue
            is_urgent = False
            insort(self.running, sequence, key=KEY)
            start = sequence.num_computed_tokens
            missing = len(sequence.token_ids) - start
            chunk = self._chunk(sequence, missing, plan.budget, plan)
            chunk = min(chunk, sequence.capacity - start)
            plan.add_row(sequence, [])
            self._advance(sequence, chunk, chunk == missing, plan)

    def _enter_row(self, sequence: Sequence) -> None:
        self.policy.queue.start(sequence)
        self.rows.take(sequence)
        sequence.status = RequestStatus.RUNNING
        sequence.publish_at = 0

    def _leave_row(self, sequence: Sequence) -> None:
        remove_by_key(self.running, sequence)
        self.rows.leave(sequence)

    # ---- preempt -------------------------------------------------------------------------

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

    def _preempt_last(self, plan: StepPlan) -> Sequence:
        """Preempt the last running sequence, for its blocks, and return it."""
        assert not self.policy.reserves_output, "a sequence outgrew its reservation"
        victim = self.running[-1]
        self._preempt(victim)
        plan.has_preempted = True
        return victim

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue without blocks; the prefix or host cache may still have them."""
        self._leave_row(sequence)
        self.deferred_frees.preempt(sequence)
        if sequence.beams is not None:
            sequence.beams.start_over()
        self.policy.queue.add_preempted(sequence, self.step)

    # ---- update --------------------------------------------------------------------------

    def update_from_output(
        self, step: ScheduledStep, token_ids: List[int], candidates: List[Candidates] = ()
    ) -> list[Emission]:
        """Take in one step's sampled ids, in order of the step's ``sampled`` sequences.

        ``candidates`` are those of the beams among them, in order; the ids of beams mean
        nothing. Ids of sequences that have ended meanwhile are dropped.
        """
        emitted: list[Emission] = []
        pairs: Iterable[tuple[Sequence, int]] = zip(step.sampled, token_ids, strict=True)
        if step.drafts and self.draft_rows is not None:
            pairs = self.draft_rows.verified(step, token_ids, emitted)
        if candidates:
            emitted += advance_groups(step, candidates, self.cache, self._finish)
            pairs = (pair for pair in pairs if pair[0].beams is None)
        self._intake.take(pairs, emitted)
        self.deferred_frees.step_done(step.decision.step)
        if self.draft_rows is not None:
            self.draft_rows.done(step)
        # Masks of draft ids are asked for too, with all that drafters learn from the step.
        self._guided.ask()
        return emitted

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, wherever it is."""
        self._guided.remove(sequence)
        if sequence.blocks.load:
            # Its blocks are being written: `_start_swapped_in` frees them.
            sequence.status, sequence.finish_reason = RequestStatus.FINISHED, reason
            return
        if sequence.status is RequestStatus.WAITING:
            self.policy.queue.drop(sequence)
        is_running = sequence.status is RequestStatus.RUNNING
        sequence.status = RequestStatus.FINISHED
        sequence.finish_reason = reason
        self.policy.sequence_ended(sequence, reason)
        if is_running:
            self._leave_row(sequence)
            self.deferred_frees.free(sequence)
