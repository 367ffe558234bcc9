"""Lanes on rank 0: a scheduler, a cache and adapters for each, planned together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages.messages import FinishReason, Submit
from trimaran.worker.kv_cache.sequence_blocks import SequenceBlocks, root_hash
from trimaran.worker.lora.manager import AdapterManager, AdapterOp
from trimaran.worker.lora.sent import PIECE_BYTES, OutgoingAdapter
from trimaran.worker.lora.store import num_piece_bytes
from trimaran.worker.requests.request import Request, Sequence
from trimaran.worker.sampling.beam_search import Candidates
from trimaran.worker.scheduling.limits import check_limits, check_queue
from trimaran.worker.scheduling.preemption import Pauses
from trimaran.worker.scheduling.resources import Loads
from trimaran.worker.scheduling.scheduler import Emission, Scheduler
from trimaran.worker.scheduling.step_plan import ScheduledStep
from trimaran.worker.steps.lane_decisions import LaneDecisions
from trimaran.worker.steps.step_types import SampledTokens

_SLACK = 2
"""Sequences that a lane may have beyond the least busy one and still get a request whose
prompt it has in its cache."""


@dataclass(slots=True)
class LaneSteps:
    """The decisions of one step, and the sequences behind each of them."""

    decision: LaneDecisions
    lanes: list[ScheduledStep | None]

    @property
    def num_context(self) -> int:
        """Sequences that compute prompt tokens."""
        return sum(step.num_context for step in self.lanes if step is not None)

    @property
    def num_context_tokens(self) -> int:
        """Their tokens."""
        return sum(step.num_context_tokens for step in self.lanes if step is not None)

    @property
    def num_scheduled(self) -> int:
        """Sequences that compute anything; of beams one."""
        return sum(step.num_scheduled for step in self.lanes if step is not None)

    @property
    def num_generation_tokens(self) -> int:
        """Ids that the step adds to outputs, or finds for beams to choose from."""
        return sum(step.num_generation_tokens for step in self.lanes if step is not None)

    def parts(self, sampled: SampledTokens) -> list[tuple[ScheduledStep, SampledTokens]]:
        """The step of each lane that has one, and what it sampled."""
        steps = [step for step in self.lanes if step is not None]
        return list(zip(steps, sampled.lanes, strict=True))


class LaneScheduler:
    """Decides a step of every lane at once. To the engine it is one `Scheduler`.

    A lane has rows, blocks and a token budget of its own. A request stays in the lane that
    it is given: the one with the fewest sequences, or one nearly as idle that has more of
    the prompt in its cache.
    """

    def __init__(self, lanes: List[Scheduler]) -> None:
        self.lanes = lanes
        self.config = lanes[0].config
        self.step = 0
        """Steps of all lanes together; each lane counts its own besides."""

    # ---- requests ------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Give a request its lane, or refuse it.

        Raises:
            RequestError: as of `Scheduler.check`; queues count together.
        """
        check_limits(request, self.config, self.lanes[0].cache)
        if self.config.has_queue_limits:
            num_free = sum(len(lane.rows.free) for lane in self.lanes)
            queues = [(lane.waiting, lane.expected) for lane in self.lanes]
            check_queue(request, self.config, queues, num_free)
        request.lane = self._choose(request)

    def expect(self, request: Request) -> None:
        """Keep its place for a checked request, until it is added, ended or given up."""
        self.lanes[request.lane].expect(request)

    def give_up(self, request: Request) -> None:
        """Keep no place any more for a request that was expected."""
        self.lanes[request.lane].give_up(request)

    def add(self, request: Request) -> None:
        """Queue a checked request."""
        self.lanes[request.lane].add(request)

    def end(self, request: Request, reason: FinishReason) -> None:
        """End all of a request's sequences now."""
        self.lanes[request.lane].end(request, reason)

    def take_failed(self) -> list[Request]:
        """Requests with a sequence that no id could go on, once each."""
        return [request for lane in self.lanes for request in lane.take_failed()]

    def take_ended(self) -> list[Emission]:
        """The ends that no step's result brought, once each."""
        return [emission for lane in self.lanes for emission in lane.take_ended()]

    def discard_ended(self, source: Hashable) -> None:
        """Forget the ends that a vanished source would have been told."""
        for lane in self.lanes:
            lane.discard_ended(source)

    @property
    def has_requests(self) -> bool:
        """Whether any sequence runs or waits, or an end is to be told."""
        return any(lane.has_requests for lane in self.lanes)

    @property
    def running(self) -> list[Sequence]:
        """Sequences with a row, of all lanes."""
        return [sequence for lane in self.lanes for sequence in lane.running]

    @property
    def waiting(self) -> list[Sequence]:
        """The queues of all lanes, one behind the other."""
        return [sequence for lane in self.lanes for sequence in lane.waiting]

    @property
    def loads(self) -> Loads:
        """Of lane 0, whose device is this rank's. Of other lanes a step's copies are taken to
        be made when its result is here; who needs them waits for them in any case."""
        return self.lanes[0].loads

    @property
    def micro_batch(self) -> int:
        """Which of the steps in flight of a pipeline the last one was."""
        return self.lanes[0].micro_batch

    @property
    def pauses(self) -> Pauses:
        """Of all lanes."""
        return Pauses.sum(lane.pauses for lane in self.lanes)

    @property
    def num_active(self) -> int:
        """Sequences that run or wait."""
        return sum(lane.num_active for lane in self.lanes)

    @property
    def num_preempted(self) -> int:
        """Sequences in the queues that ran before."""
        return sum(lane.num_preempted for lane in self.lanes)

    @property
    def num_empty_slots(self) -> int:
        """Sequences of static batches that have ended before others of them."""
        return sum(lane.num_empty_slots for lane in self.lanes)

    def _choose(self, request: Request) -> int:
        counts = [lane.num_active for lane in self.lanes]
        most = min(counts) + _SLACK
        hits = self._cached_blocks(request)
        near = [number for number, count in enumerate(counts) if count <= most]
        return min(near, key=lambda number: (-hits[number], counts[number], number))

    def _cached_blocks(self, request: Request) -> list[int]:
        """Leading blocks of the prompt that each lane's cache holds."""
        first = self.lanes[0].cache
        # Numbers of adapters are a lane's own, and not known yet: prompts with one miss. What
        # was computed without is of no use to them.
        can_hit = first.enable_reuse and not request.has_adapter
        if not can_hit or request.num_prompt_tokens <= first.block_size:
            return [0] * len(self.lanes)
        blocks = SequenceBlocks(len(first.pools), root_hash(request.cache_salt, 0))
        ids = request.prompt_ids + request.output_ids
        first.extend_hashes(blocks, ids)
        found = [lane.cache.prefixes.find(blocks, len(ids)) for lane in self.lanes]
        return [len(prefix.shared[0]) for prefix in found]

    # ---- steps ---------------------------------------------------------------------------

    def schedule(self) -> LaneSteps | None:
        """Decide the next step of every lane; None if none has anything to compute."""
        steps: list[ScheduledStep | None] = []
        for lane in self.lanes:
            # Looked at for each: the first of several idle ones is who may let others wait.
            is_beside_others = any(other.running for other in self.lanes if other is not lane)
            step = (
                lane.schedule(is_beside_others=is_beside_others) if lane.has_requests else None
            )
            steps.append(step)
        if not any(steps):
            return None
        self.step += 1
        for number, step in enumerate(steps):
            if step is not None:
                step.lane = number
        decisions = [None if step is None else step.decision for step in steps]
        return LaneSteps(LaneDecisions(self.step, decisions), steps)

    def update_from_output(
        self,
        step: ScheduledStep,
        token_ids: Iterable[int],
        candidates: List[Candidates] = (),
    ) -> list[Emission]:
        """Take in what one lane's step sampled."""
        lane = self.lanes[step.lane]
        if step.lane:
            lane.loads.done_step = step.decision.step
        return lane.update_from_output(step, token_ids, candidates)


class LaneAdapters:
    """The adapters of every lane. To the engine they are one `AdapterManager`.

    Each lane keeps each adapter that comes with a request and that it has room for, since its
    next request may go to any of them; those of folders it reads when it needs them. One whose
    host cache is full of adapters in use does without: requests that it would get go to
    another.
    """

    def __init__(self, lanes: List[AdapterManager]) -> None:
        self.lanes = lanes
        self._turn = 0

    @property
    def is_open(self) -> Callable[[Request], bool]:
        """Whether a request may still need its adapter."""
        return self.lanes[0].is_open

    @is_open.setter
    def is_open(self, is_open: Callable[[Request], bool]) -> None:
        for lane in self.lanes:
            lane.is_open = is_open

    @property
    def has_ops(self) -> bool:
        """Whether ranks of any lane are to be told of anything."""
        return any(lane.has_ops for lane in self.lanes)

    def take_ops(self) -> list[list[AdapterOp]]:
        """What ranks are to be told before the next step, by lane: together as much as of one
        lane alone, first of lanes with requests that wait for it, which take turns."""
        ops: list[list[AdapterOp]] = [[] for _ in self.lanes]
        room = PIECE_BYTES
        self._turn += 1
        numbers = [(self._turn + place) % len(self.lanes) for place in range(len(self.lanes))]
        for number in sorted(numbers, key=lambda number: not self.lanes[number].is_awaited):
            ops[number] = self.lanes[number].take_ops(room)
            room -= num_piece_bytes(ops[number])
        return ops

    def enter(self, message: Submit, request: Request) -> int:
        """The number, in its lane, of the adapter that a request asks for; 0 for none.

        The request changes its lane if that cannot have the adapter and another one does.

        Raises:
            RequestError: as of `AdapterManager.enter`, in every lane.
        """
        if message.adapter and "name" not in message.adapter:
            # It comes along this once. What is only named, one lane may have of all.
            self.keep(message.adapter_id, message.adapter)
        refusal: RequestError | None = None
        for place in range(len(self.lanes)):
            number = (request.lane + place) % len(self.lanes)
            is_for_room = refusal is None or refusal.kind is ErrorKind.UNAVAILABLE
            if not is_for_room and not self.lanes[number].knows(message):
                # It would read what the first has read, and refuse it too.
                continue
            try:
                adapter = self.lanes[number].enter(message, request)
            except RequestError as error:
                refusal = refusal or error
                continue
            request.lane = number
            return adapter
        assert refusal is not None
        raise refusal

    def digest_of(self, task: int) -> bytes:
        """As of `AdapterManager.digest_of`; lanes that have any of this id have the same."""
        return next(filter(None, (lane.digest_of(task) for lane in self.lanes)), b"")

    def keep(self, task: int, given: dict[str, Any]) -> None:
        """Cache an adapter in every lane that has room.

        Raises:
            RequestError: as of `AdapterManager.keep`; of room if no lane has any.
        """
        full: list[AdapterManager] = []
        made: list[OutgoingAdapter] = []
        for lane in self.lanes:
            try:
                lane.keep(task, given, made)
            except RequestError as error:
                if error.kind is not ErrorKind.UNAVAILABLE or len(full) == len(self.lanes) - 1:
                    raise
                full.append(lane)
        for lane in full:
            lane.retire(task, given)
