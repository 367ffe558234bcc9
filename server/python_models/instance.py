"""One instance of a Python model: a process that is started again when it dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial

from trimaran.comm.errors import ConfigError, EngineDeadError, ErrorKind, RequestError
from trimaran.server.metrics.custom_metrics import HeldMetrics
from trimaran.server.python_models.calls import ModelCalls
from trimaran.server.python_models.job import Job
from trimaran.server.python_models.process_link import ProcessLink
from trimaran.server.python_models.wire import (
    NULL_KEY,
    Call,
    CancelCall,
    CancelRequests,
    Execute,
    Executed,
    Finish,
    Log,
    Message,
    MessageTooLongError,
    MetricChange,
    Question,
    Respond,
    Result,
    Start,
)

logger = logging.getLogger(__name__)

MAX_DEATHS, DEATHS_WINDOW_S = 5, 600.0
"""A process that dies more often within this time is not started again."""


@dataclass(frozen=True, slots=True)
class InstanceSequences:
    """What an instance tells the queue of its sequences."""

    reschedule: Callable[[Job], None]
    """A job is to be executed again."""
    on_lost: Callable[..., None]
    """The process ended; ``for_good`` tells that no other process follows."""


class Instance:
    """Runs jobs in its process. Used on the event loop only.

    When the process dies, each of its jobs fails as unavailable. The process is started again,
    unless it has died too often.
    """

    def __init__(
        self,
        start: Start,
        calls: ModelCalls,
        on_free: Callable[[], None],
        sequences: InstanceSequences | None = None,
    ) -> None:
        """``on_free`` is called when the instance can take a batch, or has failed for good.
        An instance with ``sequences`` executes one batch after the other.
        """
        self._start = start
        self._sequences = sequences
        self._model_calls = calls
        self._on_free = on_free
        self._name = start.args["model_instance_name"]
        self._link: ProcessLink | None = None
        self._capacity = 1
        self._is_closing = False
        self.is_ready = False
        self.has_failed = False
        self._jobs: dict[int, Job] = {}
        self._batches: set[int] = set()
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._deaths: deque[float] = deque()
        self._metrics = HeldMetrics(calls.metrics)
        self._restart: asyncio.Task[None] | None = None

    @property
    def is_free(self) -> bool:
        """Whether the instance can take a batch now."""
        has_room = not self._capacity or len(self._batches) < self._capacity
        return self.is_ready and has_room

    @property
    def num_jobs(self) -> int:
        """Requests that the instance executes."""
        return len(self._jobs)

    async def open(self) -> None:
        """Start the process; returns once the model is initialized.

        Raises:
            ConfigError: the model cannot be initialized.
        """
        link = ProcessLink(self._take, self._ended)
        ready = await link.open(self._start)
        if not link.is_open:
            raise ConfigError("its process ended as soon as the model was initialized")
        self._capacity = ready.capacity if self._sequences is None else 1
        self._link, self.is_ready = link, True
        self._on_free()

    def execute(self, jobs: Sequence[Job]) -> None:
        """Run a batch."""
        assert self._link is not None
        number = next(self._numbers)
        wires = [job.fields().to_wire() for job in jobs]
        try:
            self._link.send(Execute(batch=number, requests=wires))
        except MessageTooLongError as error:
            for job in jobs:
                job.take(RequestError(str(error)))
            return
        self._batches.add(number)
        self._jobs.update({job.key: job for job in jobs if job.key != NULL_KEY})

    def cancel(self, job: Job) -> None:
        """Tell the model that a job is cancelled; a finished job is ignored."""
        if self._jobs.pop(job.key, None) is not None and self._link is not None:
            self._link.send(CancelRequests(keys=[job.key]))

    async def close(self) -> None:
        """Finalize the model and end its process."""
        self._is_closing = True
        self.is_ready = False
        if self._restart is not None:
            self._restart.cancel()
            # The cancelled task kills the process that it was starting, and waits for the end.
            await asyncio.wait([self._restart])
        if self._link is not None:
            self._link.send(Finish())
            await self._link.finished()

    # ---- the process --------------------------------------------------------------------

    def _take(self, link: ProcessLink, message: Message) -> None:
        if isinstance(message, Respond):
            job = self._jobs.get(message.key)
            if job is not None and job.is_overrun and message.tensors is not None:
                job.overrun()
                self.cancel(job)
                return
            if message.is_final:
                self._jobs.pop(message.key, None)
            if job is not None:
                job.take(message)
        elif isinstance(message, Executed):
            self._batches.discard(message.batch)
            self._reschedule(message.rescheduled)
            self._on_free()
        elif isinstance(message, Call):
            reply = partial(_reply, link)
            self._begin(message.call, self._model_calls.run(message, reply))
        elif isinstance(message, CancelCall):
            task = self._calls.get(message.call)
            if task is not None and task.cancel():
                error, kind = "the call was cancelled", ErrorKind.CANCELLED.name
                _reply(link, Result(call=message.call, error=error, kind=kind))
        elif isinstance(message, Question):
            self._begin(message.call, self._answer(link, message))
        elif isinstance(message, MetricChange):
            self._metrics.change(message.metric, message.verb, message.amount)
        elif isinstance(message, Log):
            logger.log(message.level, "[%s] %s", self._name, message.text)

    def _reschedule(self, keys: Sequence[int]) -> None:
        for key in keys:
            # Without the job its client is gone.
            job = self._jobs.pop(key, None)
            if job is not None and self._sequences is not None:
                self._sequences.reschedule(job)

    def _begin(self, number: int, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._calls[number] = task
        task.add_done_callback(lambda _: self._calls.pop(number, None))

    async def _answer(self, link: ProcessLink, question: Question) -> None:
        _reply(link, await self._model_calls.answer(question, self._metrics))

    def _ended(self) -> None:
        link, self._link = self._link, None
        self.is_ready = False
        self._batches.clear()
        self._metrics.drop_all()
        for task in list(self._calls.values()):
            task.cancel()
        jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.take(
                EngineDeadError(
                    f"the process of model instance '{self._name}' ended while it ran the "
                    "request; try again"
                )
            )
        if self._sequences is not None:
            self._sequences.on_lost(for_good=False)
        # Without a link the process ended before it was ready, which `open` reports.
        if link is not None and not self._is_closing:
            self._restart = asyncio.ensure_future(self._start_again(link))

    async def _start_again(self, link: ProcessLink) -> None:
        how = await link.ended()
        while True:
            now = time.monotonic()
            self._deaths.append(now)
            while self._deaths[0] < now - DEATHS_WINDOW_S:
                self._deaths.popleft()
            if len(self._deaths) > MAX_DEATHS:
                break
            logger.error(
                "Model instance '%s' %s: starting it again (%d of %d times in %g s)",
                self._name, how, len(self._deaths), MAX_DEATHS, DEATHS_WINDOW_S,
            )  # fmt: skip
            try:
                await self.open()
            except ConfigError as error:
                how = f"failed: {error}"
            else:
                return
        logger.error(
            "Model instance '%s' %s: given up after %d deaths within %g s. Mend its code and "
            "load the model again.", self._name, how, len(self._deaths), DEATHS_WINDOW_S,
        )  # fmt: skip
        self.has_failed = True
        if self._sequences is not None:
            self._sequences.on_lost(for_good=True)
        self._on_free()


def _reply(link: ProcessLink, result: Result) -> None:
    try:
        link.send(result)
    except MessageTooLongError as error:
        kind = ErrorKind.INTERNAL.name
        link.send(Result(call=result.call, error=str(error), kind=kind))
