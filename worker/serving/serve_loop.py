"""The loops of a loaded group: rank 0 serves front ends, other ranks follow its decisions."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from trimaran.comm.control.control_plane import ControlPlane
from trimaran.comm.deadlines import Watchdog
from trimaran.comm.errors import ErrorKind, ProtocolError, RequestError
from trimaran.comm.messages.messages import (
    Cancel,
    KeepAdapter,
    Message,
    Release,
    RequestFailed,
    StatsReport,
    StepOutput,
    Stop,
    Submit,
)
from trimaran.comm.messages.supervisor_link import SupervisorLink
from trimaran.worker.experts.reports import REPORT_REQUEST
from trimaran.worker.lora.adapter_messages import holds_ops
from trimaran.worker.serving.frontend_link import Arrival, FrontendLinks
from trimaran.worker.serving.outbox import Outbox, check_remote_logits, fit_logits, too_slow
from trimaran.worker.serving.rank_process import GarbageCollection
from trimaran.worker.steps.data_parallel_decisions import DataParallelDecisions
from trimaran.worker.steps.step_times import Part
from trimaran.worker.steps.step_types import SchedulerOutput

if TYPE_CHECKING:
    from trimaran.worker.engine.engine import Engine

logger = logging.getLogger(__name__)

_WRITING_S = 0.001
"""Seconds between checks of payloads that are being written, if the engine is idle."""


def describe_decision(payload: bytes) -> str:
    """A step's decision for the log: sizes and rows, without token ids."""
    if not payload:
        return "the first step"
    if payload == REPORT_REQUEST:
        return "a request for the experts' loads"
    if holds_ops(payload):
        return f"{len(payload)} bytes of adapters"
    try:
        if DataParallelDecisions.is_encoded(payload):
            return _describe_dp_ranks(DataParallelDecisions.decode(payload))
        return _describe(SchedulerOutput.decode(payload))
    except ProtocolError:
        return f"an undecodable decision of {len(payload)} bytes"


def _describe_dp_ranks(decisions: DataParallelDecisions) -> str:
    dp_ranks = ["idle" if each is None else _describe(each) for each in decisions.by_dp_rank]
    return "; ".join(f"dp rank {number}: {text}" for number, text in enumerate(dp_ranks))


def _describe(decision: SchedulerOutput) -> str:
    return (
        f"step {decision.step} ({len(decision.rows)} sequences, {decision.num_tokens} tokens, "
        f"rows {decision.rows.tolist()}, scheduled {decision.num_scheduled_tokens.tolist()}, "
        f"computed before {decision.num_computed_tokens.tolist()})"
    )


class LeaderLoop:
    """Rank 0: takes requests, steps the engine and sends tokens until shutdown.

    When idle it sleeps in the kernel on the sockets of the front ends and the supervisor.
    """

    def __init__(
        self,
        engine: Engine,
        links: FrontendLinks,
        control: ControlPlane,
        supervisor: SupervisorLink,
        watchdog: Watchdog,
        stats_period_ms: int,
    ) -> None:
        self._engine = engine
        self._links = links
        self._control = control
        self._supervisor = supervisor
        self._watchdog = watchdog
        self._stats_period_s = stats_period_ms / 1000
        self._next_stats = 0.0
        self._num_open = 0
        self._was_busy = False
        self._garbage = GarbageCollection()
        self._outbox = Outbox(links)

    def run(self) -> None:
        """Serve until the supervisor commands a shutdown."""
        with self._garbage:
            self._run()
        self._outbox.close()
        self._watchdog.pause()

    def _run(self) -> None:
        times = self._engine.times
        while not self._is_shutdown_asked():
            is_busy = self._engine.has_work
            times.enter(Part.RECEIVE if is_busy else Part.IDLE)
            if self._outbox.is_waiting:
                self._outbox.flush()
            # Flush written payloads even if nothing else happens.
            wait_s = 0.0 if is_busy or not self._outbox.is_waiting else _WRITING_S
            arrivals = self._links.poll(is_busy=is_busy or wait_s > 0, wait_s=wait_s)
            times.enter(Part.RECEIVE)
            for arrival in arrivals:
                self._take(arrival)
            if self._engine.has_work:
                self._await_newcomers()
                self._step()
            # Before the next poll, which may sleep indefinitely.
            if self._was_busy and not self._engine.has_work:
                self._rest()
            if self._links.num_open != self._num_open:
                self._num_open = self._links.num_open
                self._report_stats()

    def _await_newcomers(self) -> None:
        """Take in requests that arrive while the device is busy anyway."""
        times = self._engine.times
        while (wait_s := self._engine.spare_s) > 0:
            times.enter(Part.WAIT)
            arrivals = self._links.poll(is_busy=True, wait_s=wait_s)
            times.enter(Part.RECEIVE)
            if not arrivals:
                return
            for arrival in arrivals:
                self._take(arrival)

    def _is_shutdown_asked(self) -> bool:
        for command in self._supervisor.commands():
            if command.verb == "shutdown":
                return True
            logger.debug("rank 0 has nothing to do for command %r", command.verb)
        return False

    def _take(self, arrival: Arrival) -> None:
        source, message = arrival.source, arrival.message
        if message is None:
            self._engine.drop_source(source)
            self._outbox.drop(source)
        elif isinstance(message, Submit):
            self._submit(source, message)
        elif isinstance(message, Cancel):
            self._engine.cancel(source, message.request_ids)
        elif isinstance(message, Stop):
            self._engine.stop(message.client_request_id)
            # Front ends may be tokenizing the prompt of a request that the engine has not seen.
            self._links.send_all(message, but=source)
        elif isinstance(message, KeepAdapter):
            self._engine.keep_adapter(message)
            self._announce_adapters()
        elif isinstance(message, Release):
            self._outbox.release(source, message.numbers)
        else:
            raise ProtocolError(f"a front end sent {type(message).__name__} to an engine")

    def _submit(self, source: int, message: Submit) -> None:
        failed: RequestFailed | None = None
        try:
            self._check_logits(source, message)
            self._engine.submit(source, message)
        except RequestError as error:
            failed = RequestFailed(
                request_id=message.request_id, kind=error.kind.name, text=str(error)
            )
        # Also if the request failed afterwards.
        self._announce_adapters()
        if failed is not None:
            self._links.send(source, failed)

    def _announce_adapters(self) -> None:
        for taken in self._engine.take_new_adapters():
            self._links.send_all(taken)

    def _check_logits(self, source: int, message: Submit) -> None:
        """Refuse logits that are too large for one message to another host."""
        names = ("return_context_logits", "return_generation_logits")
        if any(map(message.sampling.get, names)) and not self._links.is_local(source):
            facts = self._engine.facts()
            check_remote_logits(message, int(facts["vocab_size"]), int(facts["max_seq_len"]))

    def _step(self) -> None:
        self._was_busy = True
        self._watchdog.watch(self._describe)
        result = self._engine.step()
        for source, message in result.messages:
            self._send(source, message)
        self._control.keep_alive()
        self._garbage.after_step()
        if time.monotonic() >= self._next_stats:
            self._report_stats()

    def _send(self, source: int, message: Message) -> None:
        """Send one message of a step. Requests whose logits exceed the link's limit fail, so
        that the front end's other requests go on."""
        failed: list[int] = []
        num_unsent = self._links.num_unsent(source)
        if (
            isinstance(message, StepOutput)
            and message.extras
            and not self._links.is_local(source)
        ):
            message, failed = fit_logits(message, num_unsent)
        self._outbox.send(source, message)
        if failed:
            self._engine.cancel(source, failed)
        for request_id in failed:
            failure = RequestFailed(
                request_id=request_id, kind=ErrorKind.INTERNAL.name, text=too_slow(num_unsent)
            )
            self._outbox.send(source, failure)

    def _rest(self) -> None:
        self._was_busy = False
        self._watchdog.pause()
        self._control.mark_idle()
        self._report_stats()
        self._engine.times.enter(Part.IDLE)
        self._garbage.at_rest()

    def _report_stats(self) -> None:
        self._next_stats = time.monotonic() + self._stats_period_s
        self._links.send_all(StatsReport(values=self._engine.stats()))
        experts = self._engine.expert_report()
        if experts is not None:
            self._links.send_all(experts)

    def _describe(self) -> str:
        return f"an engine step after {describe_decision(self._control.last_decision)}"


def follow(engine: Engine, control: ControlPlane, watchdog: Watchdog) -> None:
    """The loop of other ranks: carry out rank 0's decisions until it closes the control
    plane."""

    def describe() -> str:
        return describe_decision(control.last_decision)

    with GarbageCollection() as garbage:
        while (decision := control.receive()) is not None:
            watchdog.watch(describe)
            engine.follow(decision)
            garbage.after_step()
            watchdog.pause()
