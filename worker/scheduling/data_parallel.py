"""Data parallelism on rank 0: one scheduler, cache and adapters per dp rank, planned together.

A dp rank is a copy of the attention layers with requests of its own. All dp ranks run each step
together, since they may share experts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages.messages import FinishReason, Submit
from trimaran.worker.kv_cache.sequence_blocks import SequenceBlocks, root_hash
from trimaran.worker.lora.adapter_messages import CHUNK_BYTES, OutgoingAdapter
from trimaran.worker.lora.manager import AdapterManager, AdapterOp
from trimaran.worker.lora.store import num_chunk_bytes
from trimaran.worker.requests.request import Request, Sequence
from trimaran.worker.sampling.beam_search import Candidates
from trimaran.worker.scheduling.capacity import check_limits
from trimaran.worker.scheduling.preemption import PreemptionCounts
from trimaran.worker.scheduling.resources import SwapIns
from trimaran.worker.scheduling.scheduler import Scheduler
from trimaran.worker.scheduling.step_plan import Emission, ScheduledStep
from trimaran.worker.scheduling.waiting_queue import check_queue
from trimaran.worker.speculation.draft_counts import DraftCounts
from trimaran.worker.steps.data_parallel_decisions import DataParallelDecisions
from trimaran.worker.steps.step_types import SampledTokens

_SLACK = 2
"""Sequences that a dp rank may have beyond the least busy one and still get a request whose
prompt is in its prefix cache."""


@dataclass(slots=True)
class DataParallelStep:
    """One step of all dp ranks: the decisions, and the sequences of each rank's decision."""

    decision: DataParallelDecisions
    ranks: list[ScheduledStep | None]

    @property
    def num_context(self) -> int:
        """Sequences that compute prompt tokens."""
        return sum(step.num_context for step in self.ranks if step is not None)

    @property
    def num_context_tokens(self) -> int:
        """Prompt tokens that they compute."""
        return sum(step.num_context_tokens for step in self.ranks if step is not None)

    @property
    def num_scheduled(self) -> int:
        """Sequences that compute tokens; beams of one request count once."""
        return sum(step.num_scheduled for step in self.ranks if step is not None)

    @property
    def num_generation_tokens(self) -> int:
        """Ids that the step samples for outputs, or finds as candidates of beams."""
        return sum(step.num_generation_tokens for step in self.ranks if step is not None)

    def parts(self, sampled: SampledTokens) -> list[tuple[ScheduledStep, SampledTokens]]:
        """The step of each dp rank that has one, with its sampled ids."""
        steps = [step for step in self.ranks if step is not None]
        return list(zip(steps, sampled.by_dp_rank, strict=True))


class DataParallelScheduler:
    """Decides one step of all dp ranks. The engine uses it like one `Scheduler`.

    A dp rank has rows, blocks and a token budget of its own. A request stays on its dp rank:
    the one with the fewest sequences, or one nearly as idle with more of the prompt in its
    prefix cache.
    """

    def __init__(self, ranks: List[Scheduler]) -> None:
        self.ranks = ranks
        self.config = ranks[0].config
        self.step = 0
        """Steps of all dp ranks together. Each rank counts its own steps besides."""

    # ---- requests ------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Choose a request's dp rank, or refuse the request.

        Raises:
            RequestError: as of `Scheduler.check`; the queues of all ranks count together.
        """
        check_limits(request, self.config, self.ranks[0].cache)
        if self.config.has_queue_limits:
            num_free = sum(len(rank.rows.free) for rank in self.ranks)
            check_queue(request, self.config, [r.policy.queue for r in self.ranks], num_free)
        request.dp_rank = self._choose(request)

    def expect(self, request: Request) -> None:
        """Count a checked request as waiting until it is added, ended or given up."""
        self.ranks[request.dp_rank].expect(request)

    def give_up(self, request: Request) -> None:
        """Count a request that was expected no more."""
        self.ranks[request.dp_rank].give_up(request)

    def add(self, request: Request) -> None:
        """Queue a checked request."""
        self.ranks[request.dp_rank].add(request)

    def end(self, request: Request, reason: FinishReason) -> None:
        """End all of a request's sequences now."""
        self.ranks[request.dp_rank].end(request, reason)

    def take_failed(self) -> list[tuple[Request, RequestError]]:
        """Requests without a next id, or with a slow guide, once each."""
        return [failed for rank in self.ranks for failed in rank.take_failed()]

    def take_ended(self) -> list[Emission]:
        """The ends that no step's result brought, once each."""
        return [emission for rank in self.ranks for emission in rank.take_ended()]

    def discard_ended(self, source: Hashable) -> None:
        """Forget the ends that were to be sent to a connection that is gone."""
        for rank in self.ranks:
            rank.discard_ended(source)

    @property
    def has_requests(self) -> bool:
        """Whether any sequence runs or waits, or an end is to be sent."""
        return any(rank.has_requests for rank in self.ranks)

    def wait_for_masks(self, seconds: float) -> bool:
        """Wait for any mask of one dp rank's guides, at most this long; False if none is."""
        return any(rank.wait_for_masks(seconds) for rank in self.ranks)

    @property
    def running(self) -> list[Sequence]:
        """Sequences with a row, of all dp ranks."""
        return [sequence for rank in self.ranks for sequence in rank.running]

    @property
    def waiting(self) -> list[Sequence]:
        """The queues of all dp ranks, one behind the other."""
        return [sequence for rank in self.ranks for sequence in rank.waiting]

    @property
    def swap_ins(self) -> SwapIns:
        """The swap-ins of dp rank 0, whose device is this process's.

        The copies of another dp rank count as made when its step's result is here. A sequence
        that needs them waits for them on the device in any case.
        """
        return self.ranks[0].swap_ins

    @property
    def draft_counts(self) -> DraftCounts:
        """Draft tokens of all dp ranks since the start."""
        return DraftCounts.sum(rank.draft_counts for rank in self.ranks)

    @property
    def needs_results(self) -> bool:
        """Whether a dp rank awaits the results of all steps before the next `schedule`."""
        return any(rank.needs_results for rank in self.ranks)

    @property
    def micro_batch(self) -> int:
        """The last step's place among the steps in flight of a pipeline."""
        return self.ranks[0].micro_batch

    @property
    def preemptions(self) -> PreemptionCounts:
        """Preempted sequences of all dp ranks."""
        return PreemptionCounts.sum(rank.preemptions for rank in self.ranks)

    @property
    def num_active(self) -> int:
        """Sequences that run, wait or are expected."""
        return sum(rank.num_active for rank in self.ranks)

    @property
    def num_empty_slots(self) -> int:
        """Sequences of static batches that have ended before others of theirs."""
        return sum(rank.num_empty_slots for rank in self.ranks)

    def _choose(self, request: Request) -> int:
        counts = [rank.num_active for rank in self.ranks]
        most = min(counts) + _SLACK
        hits = self._cached_blocks(request)
        near = [number for number, count in enumerate(counts) if count <= most]
        return min(near, key=lambda number: (-hits[number], counts[number], number))

    def _cached_blocks(self, request: Request) -> list[int]:
        """Leading blocks of the prompt that each dp rank's prefix cache holds."""
        first = self.ranks[0].cache
        # A request with an adapter counts no hits: its number, which each dp rank gives itself,
        # is not known yet, and KV that was computed without the adapter is of no use.
        can_hit = first.enable_reuse and not request.has_adapter
        if not can_hit or request.num_prompt_tokens <= first.block_size:
            return [0] * len(self.ranks)
        blocks = SequenceBlocks(len(first.pools), root_hash(request.cache_salt, 0))
        ids = request.prompt_ids + request.output_ids
        first.extend_hashes(blocks, ids)
        found = [rank.cache.prefixes.find(blocks, len(ids)) for rank in self.ranks]
        return [len(prefix.shared[0]) for prefix in found]

    # ---- steps ---------------------------------------------------------------------------

    def schedule(self) -> DataParallelStep | None:
        """Decide the next step of every dp rank; None if no rank has anything to compute."""
        steps: list[ScheduledStep | None] = []
        for rank in self.ranks:
            # Evaluated for each rank, as ranks before it may have started sequences: of several
            # idle ranks only the first holds requests back.
            is_beside_others = any(other.running for other in self.ranks if other is not rank)
            step = (
                rank.schedule(is_beside_others=is_beside_others) if rank.has_requests else None
            )
            steps.append(step)
        if not any(steps):
            return None
        self.step += 1
        for number, step in enumerate(steps):
            if step is not None:
                step.dp_rank = number
        decisions = [None if step is None else step.decision for step in steps]
        return DataParallelStep(DataParallelDecisions(self.step, decisions), steps)

    def update_from_output(
        self,
        step: ScheduledStep,
        token_ids: List[int],
        candidates: List[Candidates] = (),
    ) -> list[Emission]:
        """Take in the sampled ids of one dp rank's step."""
        rank = self.ranks[step.dp_rank]
        if step.dp_rank:
            rank.swap_ins.done_step = step.decision.step
        return rank.update_from_output(step, token_ids, candidates)


class DataParallelAdapters:
    """The adapters of all dp ranks. The engine uses them like one `AdapterManager`.

    Each dp rank keeps each adapter that comes with a request, as far as it has room, since the
    next request may go to any rank. Adapters of folders are read when a rank needs them. If a
    rank's host cache is full of adapters in use, it does not keep a new one, and requests for
    that adapter go to another rank.
    """

    def __init__(self, ranks: List[AdapterManager]) -> None:
        self.ranks = ranks
        self._turn = 0

    @property
    def is_open(self) -> Callable[[Request], bool]:
        """Whether a request may still need its adapter."""
        return self.ranks[0].is_open

    @is_open.setter
    def is_open(self, is_open: Callable[[Request], bool]) -> None:
        for rank in self.ranks:
            rank.is_open = is_open

    @property
    def has_ops(self) -> bool:
        """Whether any dp rank has adapter operations to send."""
        return any(rank.has_ops for rank in self.ranks)

    def take_ops(self) -> list[list[AdapterOp]]:
        """Operations to send before the next step, by dp rank.

        All together have the size that one rank alone may send. Ranks with requests that wait
        for an adapter go first, in turn.
        """
        ops: list[list[AdapterOp]] = [[] for _ in self.ranks]
        room = CHUNK_BYTES
        self._turn += 1
        numbers = [(self._turn + offset) % len(self.ranks) for offset in range(len(self.ranks))]
        for number in sorted(numbers, key=lambda number: not self.ranks[number].is_awaited):
            ops[number] = self.ranks[number].take_ops(room)
            room -= num_chunk_bytes(ops[number])
        return ops

    def enter(self, message: Submit, request: Request) -> int:
        """The number, on its dp rank, of the adapter that a request asks for; 0 for none.

        The request changes to another dp rank if its own cannot have the adapter.

        Raises:
            RequestError: as of `AdapterManager.enter`, on every dp rank.
        """
        if message.adapter and "name" not in message.adapter:
            # The weights come this once. Adapters that are only named may be on one rank alone.
            self.keep(message.adapter_id, message.adapter)
        refusal: RequestError | None = None
        for offset in range(len(self.ranks)):
            number = (request.dp_rank + offset) % len(self.ranks)
            is_for_room = refusal is None or refusal.kind is ErrorKind.UNAVAILABLE
            if not is_for_room and not self.ranks[number].knows(message):
                # This rank would read the same files and refuse them too.
                continue
            try:
                adapter = self.ranks[number].enter(message, request)
            except RequestError as error:
                refusal = refusal or error
                continue
            request.dp_rank = number
            return adapter
        assert refusal is not None
        raise refusal

    def digest_of(self, task: int) -> bytes:
        """As of `AdapterManager.digest_of`; all dp ranks that have the adapter agree."""
        return next(filter(None, (rank.digest_of(task) for rank in self.ranks)), b"")

    def keep(self, task: int, given: dict[str, Any]) -> None:
        """Cache an adapter on every dp rank that has room.

        Raises:
            RequestError: as of `AdapterManager.keep`; for lack of room if no rank has any.
        """
        full: list[AdapterManager] = []
        made: list[OutgoingAdapter] = []
        for rank in self.ranks:
            try:
                rank.keep(task, given, made)
            except RequestError as error:
                if error.kind is not ErrorKind.UNAVAILABLE or len(full) == len(self.ranks) - 1:
                    raise
                full.append(rank)
        for rank in full:
            rank.retire(task, given)
