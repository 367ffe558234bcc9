"""The queue of a Python model with ``sequence_batching``: sequences, slots and batches.

The requests of a sequence are executed one after the other, by one instance. A sequence holds
a slot of that instance from its first request to its last. Sequences without a slot wait in the
backlog, first come, first served. The strategies are Triton's: *direct* fills a batch with the
next request of each slot, *oldest* with the requests that arrived first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import (
    ConfigError,
    EngineDeadError,
    ErrorKind,
    RequestError,
)
from trimaran.server.inference.request import InferRequest
from trimaran.server.python_models.job import Job, batch_shapes, ragged_inputs
from trimaran.server.python_models.sequence_inputs import (
    SequenceInputs,
    as_null,
    with_states,
)
from trimaran.server.python_models.wire import SEQUENCE_END, SEQUENCE_START, Packed

logger = logging.getLogger(__name__)

DEFAULT_IDLE_S = 1.0
"""Without ``max_sequence_idle_microseconds``, as in Triton."""


@dataclass(slots=True, eq=False)
class _Slot:
    instance: int
    number: int
    sequence: RequestSequence | None = None


@dataclass(slots=True, eq=False)
class RequestSequence:
    """One sequence of requests."""

    id: int | str
    slot: _Slot | None = None
    jobs: deque[Job] = field(default_factory=deque)
    states: dict[str, Packed] = field(default_factory=dict)
    is_started: bool = False
    """Whether a request was executed: its instance then holds the sequence's memory."""
    idle: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        """The sequence is not idle."""
        if self.idle is not None:
            self.idle.cancel()
            self.idle = None


MAX_SLOTS = 1 << 16
"""Most sequences that one instance holds at the same time."""


def check_sequences(path: Path, config: ModelConfig) -> None:
    """Refuse settings of ``sequence_batching`` that cannot take effect.

    Raises:
        ConfigError: names the file, the setting, its value and the limit.
    """
    batching = config.sequence_batching
    largest = max(1, config.max_batch_size)
    candidates = batching.oldest.max_candidate_sequences
    if batching.HasField("oldest") and not 1 <= candidates <= MAX_SLOTS:
        raise ConfigError(
            f"{path}: max_candidate_sequences of sequence_batching is {candidates} but must be "
            f"from 1 to {MAX_SLOTS}"
        )
    for size in batching.oldest.preferred_batch_size:
        if not 1 <= size <= largest:
            raise ConfigError(
                f"{path}: preferred_batch_size of sequence_batching is {size} but must be from "
                f"1 to {largest}, the largest batch of the model"
            )
    share = batching.direct.minimum_slot_utilization
    if not 0 <= share <= 1:
        raise ConfigError(
            f"{path}: minimum_slot_utilization of sequence_batching is {share:g} but must be "
            "from 0 to 1"
        )


class SequenceQueue:
    """Jobs of sequences, given out in batches of one job a sequence. Used on the event loop."""

    def __init__(
        self,
        config: ModelConfig,
        num_instances: int,
        inputs: SequenceInputs,
        on_change: Callable[[], None],
    ) -> None:
        """``on_change`` is called when an idle sequence has left its slot."""
        batching = config.sequence_batching
        self._name = config.name
        self._inputs = inputs
        self._on_change = on_change
        self._ragged = ragged_inputs(config)
        self._is_iterative = batching.iterative_sequence
        self._is_direct = not batching.HasField("oldest")
        strategy = batching.direct if self._is_direct else batching.oldest
        self._delay_s: float = strategy.max_queue_delay_microseconds / 1e6
        self._max_batch_size = max(1, config.max_batch_size)
        num_slots = self._max_batch_size
        if self._is_direct:
            self._due_size = math.ceil(batching.direct.minimum_slot_utilization * num_slots)
        else:
            num_slots = batching.oldest.max_candidate_sequences
            preferred = batching.oldest.preferred_batch_size
            self._due_size = min(preferred, default=self._max_batch_size)
        idle_us = batching.max_sequence_idle_microseconds
        self._idle_s = idle_us / 1e6 or DEFAULT_IDLE_S
        self._slots = [
            [_Slot(instance, number) for number in range(num_slots)]
            for instance in range(num_instances)
        ]
        self._open: dict[int | str, RequestSequence] = {}
        self._backlog: deque[RequestSequence] = deque()
        self._of_job: dict[int, RequestSequence] = {}
        # The sequences of the jobs that an instance executes, by the jobs' keys.
        self._running: list[dict[int, RequestSequence]] = [{} for _ in range(num_instances)]
        self._own_ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._of_job)

    def timeout_s(self, job: Job) -> float:
        """Sequences have no queue policy: 0 is unlimited."""
        return 0.0

    # ---- requests -----------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Add a job to its sequence.

        Raises:
            RequestError: the request is no part of a sequence.
        """
        request = job.request
        self._check(job)
        if self._is_iterative:
            sequence = RequestSequence(request.sequence_id or next(self._own_ids))
            job.sequence_id, job.flags = sequence.id, SEQUENCE_START
        elif (found := self._open.get(request.sequence_id)) is not None:
            sequence = found
        else:
            sequence = self._open[request.sequence_id] = RequestSequence(request.sequence_id)
        if sequence.jobs or sequence.is_started:
            self._warn_of_second_start(job)
        sequence.stop_timer()
        sequence.jobs.append(job)
        self._of_job[job.key] = sequence
        if request.sequence_end and not self._is_iterative:
            del self._open[sequence.id]
        if sequence.slot is None and sequence not in self._backlog:
            self._backlog.append(sequence)
            self._fill_slots()

    def reschedule(self, job: Job) -> None:
        """Execute a job of an iterative sequence again."""
        found = (running.get(job.key) for running in self._running)
        sequence = next(filter(None, found), None)
        if sequence is not None:
            job.flags = 0
            sequence.jobs.appendleft(job)
            self._of_job[job.key] = sequence

    def remove(self, job: Job) -> bool:
        """Remove a job whose client is gone; whether it was still waiting.

        A sequence that lacks a request is over: its other waiting requests fail.
        """
        sequence = self._of_job.get(job.key)
        if sequence is None:
            return False
        sequence.jobs.remove(job)
        del self._of_job[job.key]
        text = "the sequence ended: the client of an earlier request of it is gone"
        self._end(sequence, RequestError(text, ErrorKind.CANCELLED))
        self._fill_slots()
        return True

    def drain(self) -> list[Job]:
        """Remove all jobs, and end their sequences."""
        sequences = {id(each): each for each in self._of_job.values()}
        jobs = [job for each in sequences.values() for job in each.jobs]
        for sequence in sequences.values():
            sequence.jobs.clear()
            self._end(sequence, None)
        self._of_job.clear()
        return jobs

    def _check(self, job: Job) -> None:
        request = job.request
        flags, sequence_id = job.flags, request.sequence_id
        words = f"inference request to model '{self._name}' must specify"
        if job.batch_size > 1 and self._inputs.is_batching:
            raise RequestError(f"{words} batch-size 1 due to requirements of sequence batcher")
        if not sequence_id and not self._is_iterative:
            raise RequestError(f"{words} a non-zero or non-empty correlation ID")
        is_open = sequence_id in self._open or (self._is_iterative and not sequence_id)
        if not is_open and not flags & SEQUENCE_START:
            raise RequestError(
                f"inference request for sequence {sequence_id} to model '{self._name}' must "
                "specify the START flag on the first request of the sequence"
            )
        # Raised for this request here, before the request is part of a batch.
        self._inputs.controls(sequence_id, flags)

    def _warn_of_second_start(self, job: Job) -> None:
        if job.flags & SEQUENCE_START:
            logger.warning(
                "sequence %s for model '%s' has a conflict. The previous sequence did not end "
                "before this sequence start. Previous sequence will be terminated early.",
                job.sequence_id, self._name,
            )  # fmt: skip

    # ---- batches ------------------------------------------------------------------------

    def place(self, free: Sequence[int]) -> tuple[int | None, float]:
        """The free instance whose batch is due; else None, with the seconds until a batch is
        due. The seconds are infinite if no free instance has a request.
        """
        next_s = math.inf
        for instance in free:
            self._settle(instance)
            due_s = self._due_s(instance)
            if not due_s:
                return instance, 0.0
            next_s = min(next_s, due_s)
        return None, next_s

    def take(self, instance: int) -> list[Job]:
        """The next batch of an instance. Slots without a request have null requests."""
        batch: list[Job] = []
        jobs = self._next(instance)
        null = None
        for job in jobs:
            if job is None:
                null = null or self._null(next(each for each in jobs if each is not None))
                batch.append(null)
                continue
            sequence = self._of_job.pop(job.key)
            sequence.jobs.remove(job)
            self._prepare(sequence, job)
            self._running[instance][job.key] = sequence
            if job.flags & SEQUENCE_END and not self._is_iterative:
                self._leave_slot(sequence)
            batch.append(job)
        self._fill_slots()
        return batch

    def _prepare(self, sequence: RequestSequence, job: Job) -> None:
        sequence.is_started = True
        if job.flags & SEQUENCE_START:
            sequence.states = self._inputs.initial_states()
        job.sequence_inputs = [
            *self._inputs.controls(job.sequence_id, job.flags),
            *with_states(sequence.states),
        ]
        job.take_states = lambda found: self._inputs.take_states(found, sequence.states)

    def _null(self, like: Job) -> Job:
        request = InferRequest(model_name=self._name, model_version=like.request.model_version)
        null = Job(request, is_null=True)
        empty_id = "" if isinstance(like.sequence_id, str) else 0
        null.sequence_inputs = [
            *as_null(like.packed),
            *self._inputs.controls(empty_id, 0, is_ready=False),
            *with_states(self._inputs.initial_states()),
        ]
        return null

    def _next(self, instance: int) -> list[Job | None]:
        """The requests of the next batch; for the direct strategy by slot, with gaps."""
        heads = [
            slot.sequence.jobs[0] if slot.sequence and slot.sequence.jobs else None
            for slot in self._slots[instance]
        ]
        ready = sorted((job for job in heads if job), key=lambda job: job.arrived_s)
        if not ready:
            return []
        first = batch_shapes(ready[0], self._ragged)
        equal = [job for job in ready if batch_shapes(job, self._ragged) == first]
        if not self._is_direct:
            return list(equal[: self._max_batch_size])
        last = max(index for index, job in enumerate(heads) if job in equal)
        return [job if job in equal else None for job in heads[: last + 1]]

    def _due_s(self, instance: int) -> float:
        """Seconds until the next batch of an instance is due; infinite without a request."""
        jobs = [job for job in self._next(instance) if job is not None]
        if not jobs:
            return math.inf
        if not self._delay_s or len(jobs) >= self._due_size:
            return 0.0
        oldest = min(job.arrived_s for job in jobs)
        return max(0.0, oldest + self._delay_s - time.monotonic())

    # ---- slots --------------------------------------------------------------------------

    def lose(self, instance: int, *, for_good: bool) -> None:
        """The process of an instance ended, and the memory of its sequences with it.

        Sequences that had begun there fail. ``for_good``: the instance takes no more sequences.
        """
        slots = self._slots[instance]
        self._running[instance].clear()
        for slot in slots:
            sequence = slot.sequence
            if sequence is None:
                continue
            if sequence.is_started:
                text = (
                    f"the process that held sequence {sequence.id} of model '{self._name}' "
                    "ended; start the sequence again"
                )
                self._end(sequence, EngineDeadError(text))
            elif for_good:
                self._leave_slot(sequence)
                self._backlog.appendleft(sequence)
        if for_good:
            slots.clear()
        self._fill_slots()

    def _fill_slots(self) -> None:
        """Give free slots to the backlog: the lowest numbers first, over all instances."""
        if not self._backlog:
            return
        every = sorted(itertools.chain(*self._slots), key=lambda slot: slot.number)
        for slot in every:
            if slot.sequence is None and self._backlog:
                slot.sequence = self._backlog.popleft()
                slot.sequence.slot = slot

    def _settle(self, instance: int) -> None:
        """The batch of an instance is executed: sequences without a request become idle."""
        executed, self._running[instance] = self._running[instance], {}
        for sequence in executed.values():
            if sequence.slot is None or sequence.jobs:
                continue
            if self._is_iterative:
                self._leave_slot(sequence)
                continue
            loop = asyncio.get_running_loop()
            sequence.idle = loop.call_later(self._idle_s, self._end_idle, sequence)
        self._fill_slots()

    def _end_idle(self, sequence: RequestSequence) -> None:
        logger.info(
            "sequence %s of model '%s' ended: it was idle for %g s",
            sequence.id, self._name, self._idle_s,
        )  # fmt: skip
        self._end(sequence, None)
        self._fill_slots()
        self._on_change()

    def _end(self, sequence: RequestSequence, error: RequestError | None) -> None:
        """End a sequence, and fail the requests of it that wait."""
        sequence.stop_timer()
        if self._open.get(sequence.id) is sequence:
            del self._open[sequence.id]
        if sequence in self._backlog:
            self._backlog.remove(sequence)
        self._leave_slot(sequence)
        for job in sequence.jobs:
            del self._of_job[job.key]
            if error is not None:
                job.take(error)
        sequence.jobs.clear()

    def _leave_slot(self, sequence: RequestSequence) -> None:
        if sequence.slot is not None:
            sequence.slot.sequence, sequence.slot = None, None
