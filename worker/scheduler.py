"""What each step computes: admission, chunking, preemption, and taking in the results."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Iterable
from operator import attrgetter

from trimaran.comm.messages import FinishReason
from trimaran.worker.config import SchedulerConfig
from trimaran.worker.fair_chunks import left_to_waiting
from trimaran.worker.growth import GrowthForecast
from trimaran.worker.guided.guide import Masks
from trimaran.worker.kv_cache.manager import KVCacheManager, Prefix
from trimaran.worker.limits import check_limits
from trimaran.worker.loads import Loads
from trimaran.worker.lora.manager import AdapterManager
from trimaran.worker.request import NEVER, Request, RequestStatus, Sequence
from trimaran.worker.step_plan import ScheduledStep, StepPlan
from trimaran.worker.step_types import TransferKind, int32s

_KEY = attrgetter("key")
_WATERMARK = 0.01
"""Share of the blocks that admission leaves free for the growth of running sequences."""
_PATIENCE = 16
"""Steps until admission is tried again, unless a sequence ends before."""
_REFUSED_STEPS = 4

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
    ) -> None:
        """Without ``adapters`` no request may have one."""
        self.config = config
        self.cache = cache
        self._adapters = adapters
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.loads = Loads()
        self.step = 0
        self._is_static = config.policy == "static_batch" or config.is_v1
        self._batch_size = 0
        """Sequences of the static batch that runs, as it was formed."""
        self._can_preempt = config.policy == "max_utilization" and not self._is_static
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._finished_rows: list[int] = []
        self._num_processed_steps = 0
        self._to_release: deque[Sequence] = deque()
        self._ended: list[Emission] = []
        self._num_preempted = 0
        self._growth = GrowthForecast(config.expected_output_tokens)
        self._num_guided = 0
        """Sequences that follow a guide and have not ended."""
        self._masks = Masks()
        self._failed: list[Request] = []
        self._shares_prompts = config.enable_chunked_context and not self._is_static
        self._refused_until = 0
        """The step before which long prompts leave nothing to those that wait for blocks."""
        self._full_until = 0
        """The step before which no room is expected for another sequence."""
        self._wait_step = 0
        """The last step whose copies from the host the next step builds on."""

    # ---- requests ------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Refuse a request that the limits can never admit.

        Raises:
            RequestError: names the value, the limit and the remedy.
        """
        num_queued = len(self.waiting) - len(self._free_rows)
        check_limits(request, self.config, self.cache, num_queued)

    def add(self, request: Request) -> None:
        """Queue a checked request. A replayed one may turn out to be complete."""
        request.start_sequences(len(self.cache.pools))
        self._num_guided += request.grammar is not None and len(request.sequences)
        first = request.sequences[0]
        if request.output_ids:
            reason = first.ends_by(request.output_ids[-1])
            if reason is not FinishReason.NOT_FINISHED:
                self._finish(first, reason)
                self._ended.append((first, -1, reason))
                return
        self.cache.extend_hashes(first.blocks, first.token_ids)
        self._enqueue(first)

    def end(self, request: Request, reason: FinishReason) -> None:
        """End all of a request's sequences now, by cancellation or timeout."""
        if not request.sequences:
            request.start_sequences(len(self.cache.pools))
            self._num_guided += request.grammar is not None and len(request.sequences)
        for sequence in request.sequences:
            if sequence.status is not RequestStatus.FINISHED:
                self._finish(sequence, reason)
                self._ended.append((sequence, -1, reason))

    def take_failed(self) -> list[Request]:
        """Requests with a sequence that no id could go on, once each; all of it has ended."""
        failed, self._failed = self._failed, []
        return failed

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
    def num_preempted(self) -> int:
        """Sequences in the queue that ran before."""
        return self._num_preempted

    @property
    def num_empty_slots(self) -> int:
        """Sequences of the static batch that have ended before others of it."""
        is_running = self._is_static and self.running
        return max(0, self._batch_size - len(self.running)) if is_running else 0

    # ---- planning ------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """Decide the next step; None if there is nothing to compute."""
        plan = StepPlan(self.step + 1, self.config.max_num_batched_tokens)
        self.cache.begin_step()
        was_empty = not self.running and not self.loads
        self._plan_running(plan)
        if self.loads:
            self._start_loaded(plan, is_urgent=False)
        if not plan.has_preempted and (was_empty or not self._is_static):
            self._admit(plan)
            self._batch_size = len(self.running)
        if self.loads and not plan.has_entries:
            self._start_loaded(plan, is_urgent=True)
        if not plan.has_entries:
            return None
        if self.cache.hosts:
            self._add_transfers(plan)
        self.step += 1
        finished, self._finished_rows = self._finished_rows, []
        self._enqueue_forks(plan)
        scheduled = plan.finish(finished)
        if self._num_guided:
            guides = [s.guide for s in scheduled.sampled if s.guide is not None]
            if guides:
                scheduled.decision.masks = self._masks.fill(guides).reshape(-1)
        return scheduled

    def _plan_running(self, plan: StepPlan) -> None:
        # Ordered by key: whoever is preempted comes later in it than whoever needs room.
        index = 0
        running, step = self.running, plan.step
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
                continue
            num_later = len(running) - index
            chunk = (
                1 if missing == 1 else self._chunk(sequence, missing, plan.budget, num_later)
            )
            if self.cache.window and len(sequence.request.sequences) == 1:
                self.cache.leave_behind(sequence.blocks, start)
            if self._make_room(sequence, start + chunk, plan):
                self._advance(sequence, chunk, chunk == missing, plan)

    def _chunk(self, sequence: Sequence, missing: int, budget: int, num_later: int = 0) -> int:
        """Tokens to compute now; an incomplete prompt stops at a block's end if it can.

        One that needs more than a step leaves a token to each of the ``num_later`` running
        sequences behind it, and up to half of the rest to short prompts that wait.
        """
        budget = max(1, budget - num_later)
        if missing <= budget:
            return missing
        if self._free_rows and self._shares_prompts and self.step >= self._refused_until:
            budget -= left_to_waiting(self.waiting, budget)
        start, size = sequence.num_computed_tokens, self.cache.block_size
        aligned = (start + budget) // size * size - start
        return aligned if aligned > 0 else budget

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Grow a running sequence, preempting others; False if it was preempted itself."""
        if num_tokens <= sequence.capacity:
            return True
        blocks = sequence.blocks
        num_blocks = blocks.num_blocks
        while not self.cache.grow(blocks, num_tokens):
            assert self._can_preempt, "a sequence outgrew its reservation"
            victim = self.running[-1]
            self._preempt(victim)
            plan.has_preempted = True
            if victim is sequence:
                return False
        plan.add_blocks(sequence.row, blocks, num_blocks)
        sequence.capacity = blocks.num_blocks * self.cache.block_size
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue: what was computed is freed, though it may be found again."""
        self._leave_row(sequence)
        self.cache.release(sequence.blocks)
        sequence.num_computed_tokens = 0
        sequence.is_preempted = True
        self._num_preempted += 1
        self._enqueue(sequence)

    def _advance(
        self, sequence: Sequence, chunk: int, is_sampled: bool, plan: StepPlan
    ) -> None:
        start = sequence.num_computed_tokens
        plan.add(sequence, start, chunk, is_sampled)
        sequence.num_computed_before = start
        sequence.num_computed_tokens = start + chunk
        sequence.last_step = plan.step
        if is_sampled:
            sequence.num_pending += 1
        if start + chunk >= sequence.publish_at:
            # Layers write a step's KV before they read any, so it can be shared at once.
            self.cache.publish(sequence.blocks, start + chunk)
            size = self.cache.block_size
            sequence.publish_at = (
                (sequence.blocks.num_published + 1) * size if self.cache.enable_reuse else NEVER
            )

    def _admit(self, plan: StepPlan) -> None:
        while self.waiting and self._free_rows and plan.budget > 0:
            sequence = self.waiting[0]
            # A preempted one comes back when the host knows all of its tokens.
            if sequence.num_pending or not self._has_future(sequence, plan):
                return
            if not self._start(sequence, plan):
                self._refused_until = plan.step + _REFUSED_STEPS
                return

    def _has_future(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Whether it can be expected to end before anybody must be preempted for room."""
        if not self._can_preempt or not self.running:
            return True
        if plan.step < self._full_until:
            return False
        cache = self.cache
        peak, held = self._growth.peak([*self.running, *self.loads, sequence])
        # Shared blocks are held once, and of the last block of each half is empty.
        num_held = (cache.num_blocks - cache.num_free) * cache.block_size
        shared = max(0.0, held - len(sequence.token_ids) - num_held)
        room = cache.num_blocks * cache.block_size * (1.0 - _WATERMARK)
        if peak - shared + len(self.running) * cache.block_size / 2 <= room:
            return True
        self._full_until = plan.step + _PATIENCE
        return False

    def _start(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Admit one sequence with its first chunk, or return False and change nothing."""
        cache, blocks = self.cache, sequence.blocks
        num_known = len(sequence.token_ids)
        prefix = self._find_prefix(sequence, plan.step)
        worst = self._most_held(max(num_known, sequence.max_len - 1))
        lifetime = self._most_held(num_known + 1) if self._can_preempt else worst
        watermark = self._watermark if self._can_preempt and self.running else 0
        needed = cache.blocks_to_take(prefix, min(lifetime, worst))
        if prefix.is_under_way or needed > cache.num_available - watermark:
            return False
        num_cached = (len(prefix.shared[0]) + prefix.num_stored) * cache.block_size
        if prefix.last:
            num_cached = num_known - 1
        missing = num_known - num_cached
        can_wait = missing <= self.config.max_num_batched_tokens
        if missing > plan.budget and can_wait and not self.config.enable_chunked_context:
            return False
        if not self._has_adapter(sequence):
            return False
        sequence.num_computed_tokens, copies = cache.begin(blocks, prefix, num_known)
        if sequence.figures is not None:
            num_prompt_blocks = cache.blocks_for(sequence.num_prompt_tokens)
            sequence.figures.started(num_prompt_blocks, blocks.num_blocks, len(copies))
        if not self._can_preempt:
            cache.reserve(blocks, worst)
        chunk = self._chunk(sequence, missing, plan.budget)
        has_room = cache.grow(blocks, num_cached + chunk)
        assert has_room, "a sequence was admitted without room for its first chunk"
        sequence.capacity = blocks.num_blocks * cache.block_size
        self._take_row(sequence)
        if blocks.load:
            self.loads.add(sequence, plan.step)
            return True
        insort(self.running, sequence, key=_KEY)
        plan.add_row(sequence, copies)
        self._advance(sequence, chunk, chunk == missing, plan)
        return True

    def _start_loaded(self, plan: StepPlan, *, is_urgent: bool) -> None:
        """Let those run whose prefix has come from the host.

        With ``is_urgent`` the first runs in any case: the device waits for its copies.
        """
        while plan.budget > 0:
            taken = self.loads.take(is_urgent=is_urgent)
            if taken is None:
                return
            # Sent along even if it is over: the other ranks' copies may not be.
            self._wait_step, sequence = taken
            self.cache.loaded(sequence.blocks)
            if sequence.status is RequestStatus.FINISHED:
                self._free_rows.append(sequence.row)
                sequence.row = -1
                self.cache.release(sequence.blocks)
                continue
            is_urgent = False
            insort(self.running, sequence, key=_KEY)
            start = sequence.num_computed_tokens
            missing = len(sequence.token_ids) - start
            chunk = self._chunk(sequence, missing, plan.budget)
            chunk = min(chunk, sequence.capacity - start)
            plan.add_row(sequence, [])
            self._advance(sequence, chunk, chunk == missing, plan)

    def _add_transfers(self, plan: StepPlan) -> None:
        moves, loads = self.cache.take_transfers()
        transfers = [(TransferKind.MOVE, *move) for move in moves]
        transfers += [(TransferKind.LOAD, *load) for load in loads]
        if self._wait_step:
            transfers.append((TransferKind.WAIT, self._wait_step, 0, 0))
            self._wait_step = 0
        if transfers:
            plan.transfers = int32s(transfers, 4)

    def _most_held(self, num_tokens: int) -> int:
        return self.cache.most_held(num_tokens, self.config.max_num_batched_tokens)

    def _find_prefix(self, sequence: Sequence, step: int) -> Prefix:
        """What it can start with: its parent's prompt, or whatever is cached."""
        if sequence.request.sampling.return_context_logits and not sequence.num_output_tokens:
            # A token whose KV is found has no logits.
            return Prefix([[] for _ in self.cache.pools], [])
        parent, num_known = sequence.parent, len(sequence.token_ids)
        if parent is not None and parent.row >= 0 and not sequence.num_output_tokens:
            is_running = parent.last_step == step
            computed = parent.num_computed_before if is_running else parent.num_computed_tokens
            if computed >= num_known:
                return self.cache.find_fork(parent.blocks, num_known)
        return self.cache.find_prefix(sequence.blocks, num_known)

    def _has_adapter(self, sequence: Sequence) -> bool:
        """Whether its adapter, if it has one, is or can be brought where the model runs."""
        number = sequence.request.adapter_id
        return not number or self._adapters is None or self._adapters.make_ready(number)

    @property
    def _watermark(self) -> int:
        return int(self.cache.num_blocks * _WATERMARK)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = RequestStatus.WAITING
        insort(self.waiting, sequence, key=_KEY)

    def _enqueue_forks(self, plan: StepPlan) -> None:
        """Queue the siblings of sequences whose prompt this step completes."""
        for sequence in plan.first_samples:
            for sibling in sequence.request.sequences[1:]:
                if sibling.status is RequestStatus.NEW:
                    self.cache.extend_hashes(sibling.blocks, sibling.token_ids)
                    self._enqueue(sibling)

    def _take_row(self, sequence: Sequence) -> None:
        _remove(self.waiting, sequence)
        if sequence.is_preempted:
            sequence.is_preempted = False
            self._num_preempted -= 1
        sequence.row = self._free_rows.pop()
        sequence.status = RequestStatus.RUNNING
        sequence.publish_at = 0

    def _leave_row(self, sequence: Sequence) -> None:
        _remove(self.running, sequence)
        self._free_rows.append(sequence.row)
        self._finished_rows.append(sequence.row)
        sequence.row = -1

    # ---- results -------------------------------------------------------------------------

    def update_from_output(
        self, step: ScheduledStep, token_ids: Iterable[int]
    ) -> list[Emission]:
        """Take in one step's sampled ids, in order of the step's ``sampled`` sequences.

        The id of a sequence that has ended meanwhile is dropped.
        """
        emitted: list[Emission] = []
        not_finished = FinishReason.NOT_FINISHED
        for sequence, token_id in zip(step.sampled, token_ids, strict=True):
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
                if not self._follows_guide(sequence, token_id):
                    continue
                reason = self._look_at(sequence, token_id)
            emitted.append((sequence, token_id, reason))
        self._num_processed_steps = step.decision.step
        self._release_ended()
        return emitted

    def _look_at(self, sequence: Sequence, token_id: int) -> FinishReason:
        """Hash a block that the new token fills, and end the sequence if it does."""
        num_known, block_size = len(sequence.token_ids), self.cache.block_size
        if num_known % block_size == 0:
            self.cache.extend_hashes(sequence.blocks, sequence.token_ids)
        next_end = (num_known // block_size + 1) * block_size
        sequence.look_at = min(sequence.max_len, next_end)
        reason = sequence.ends_by(token_id)
        if sequence.guide is not None:
            sequence.look_at = 0
            if reason is FinishReason.NOT_FINISHED and sequence.guide.is_complete:
                reason = FinishReason.END_ID
        if reason is not FinishReason.NOT_FINISHED:
            self._finish(sequence, reason)
        return reason

    def _follows_guide(self, sequence: Sequence, token_id: int) -> bool:
        """Go on in the sequence's guide; False if its request fails.

        That is where other parameters forbid all that the guide allows: the draw then takes
        an id that must not come.
        """
        guide = sequence.guide
        if guide is None or guide.accept(token_id):
            return True
        for each in sequence.request.sequences:
            if each.status is not RequestStatus.FINISHED:
                self._finish(each, FinishReason.CANCELLED)
        self._failed.append(sequence.request)
        return False

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.blocks.load:
            # Its blocks are being written: `_start_loaded` frees them.
            sequence.status, sequence.finish_reason = RequestStatus.FINISHED, reason
            return
        if sequence.status is RequestStatus.WAITING:
            _remove(self.waiting, sequence)
            self._num_preempted -= sequence.is_preempted
        is_running = sequence.status is RequestStatus.RUNNING
        sequence.status = RequestStatus.FINISHED
        sequence.finish_reason = reason
        self._full_until = 0
        self._num_guided -= sequence.guide is not None
        if is_running:
            self._growth.observe(sequence.num_output_tokens, reason is FinishReason.LENGTH)
            self._leave_row(sequence)
            if sequence.last_step > self._num_processed_steps:
                self._to_release.append(sequence)
            else:
                self.cache.release(sequence.blocks)

    def _release_ended(self) -> None:
        """Free the blocks of ended sequences that no step in flight writes any more."""
        for _ in range(len(self._to_release)):
            sequence = self._to_release.popleft()
            if sequence.last_step > self._num_processed_steps:
                self._to_release.append(sequence)
            else:
                self.cache.release(sequence.blocks)


def _remove(sequences: list[Sequence], sequence: Sequence) -> None:
    """Take one out of a list that is ordered by key; no two keys are equal."""
    place = bisect_left(sequences, sequence.key, key=_KEY)
    assert sequences[place] is sequence, "a sequence is not where its key says"
    del sequences[place]
