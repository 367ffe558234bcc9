"""The engine of one rank: requests in, steps decided and run, tokens out."""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from trimaran.comm.collectives.tensor_group import TensorParallelGroup
from trimaran.comm.control.control_plane import ControlPlane
from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages.messages import (
    AdapterTaken,
    ExpertReport,
    FinishReason,
    KeepAdapter,
    Message,
    RequestFailed,
    Submit,
)
from trimaran.comm.stages.pipeline import PipelineLinks
from trimaran.comm.stages.world_group import WorldGroup
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_config import RankConfig
from trimaran.worker.engine.compilations import Compilations
from trimaran.worker.engine.input_processor import GuidedRequests, request_from
from trimaran.worker.engine.interfaces import EngineStep, engine_parts
from trimaran.worker.engine.loading import LoadedEngine, load_engine
from trimaran.worker.engine.output_processor import EngineStats, StepDetails, step_outputs
from trimaran.worker.engine.plan_timing import PlanTiming
from trimaran.worker.engine.step_profile import StepProfile
from trimaran.worker.execution.device import select_device
from trimaran.worker.execution.step_result import ModelRunnerOutput
from trimaran.worker.experts.reports import REPORT_REQUEST, ExpertReports
from trimaran.worker.guided.compiler import GuideCompiler
from trimaran.worker.lora.adapter_messages import decode_ops, encode_ops, holds_ops
from trimaran.worker.requests.request import Request
from trimaran.worker.scheduling.step_plan import Emission
from trimaran.worker.steps.step_times import Part, StepTimes

logger = logging.getLogger(__name__)

_FEW = 128
"""With up to this many running sequences a step is planned late, so that newcomers join it."""

_GRAMMAR_S = 0.002
"""Longest sleep while all requests wait for grammars; new requests wait as long."""

_WAITED_S = 0.0002
"""If the host waited longer than this for a result, the device finished it just then."""


@dataclass(slots=True)
class StepResult:
    """The messages of one step for the front ends, by connection."""

    messages: list[tuple[Any, Message]] = field(default_factory=list)
    """With the sources that the caller gave to `Engine.submit`."""


@dataclass(slots=True)
class _Untold:
    """A result that the scheduler has taken in, and front ends have not been told."""

    step: int
    emissions: list[Emission]
    details: StepDetails | None

    @property
    def has_extras(self) -> bool:
        """Whether messages have more than ids, which the next planning may change."""
        return any(sequence.request.has_extras for sequence, _, _ in self.emissions)


class Engine:
    """One loop for every mode: keeps up to ``depth`` steps in flight on the device.

    Rank 0 schedules, sends each decision to the other ranks and takes in the sampled ids. The
    others `follow`. Every rank of a stage samples the same ids, so none is sent back; in a
    pipeline the last stage sends them to rank 0. With depth 1 a step's result is known before
    the next is planned. With 2 the device has the next step before the host sees the last one's
    ids. A pipeline has at least one step per stage.
    """

    def __init__(
        self,
        loaded: LoadedEngine,
        topology: ParallelLayout,
        control: ControlPlane,
        profile: StepProfile | None = None,
    ) -> None:
        """An engine that is ready to step. `load` makes one from a configuration."""
        self._loaded = loaded
        self._topology = topology
        self._control = control
        self._profile = profile
        self.device = loaded.device
        self.depth = loaded.depth
        parts = engine_parts(loaded, topology)
        self.runner, self.scheduler, self._adapters, self._decode = parts
        self._adapters.is_open = self._is_open
        self._guided = GuidedRequests(_guide_compiler(loaded, topology))
        self._in_flight: deque[tuple[EngineStep, ModelRunnerOutput]] = deque()
        self._requests: dict[tuple[Hashable, int], list[Request]] = {}
        self._num_submitted = 0
        self._taken: list[AdapterTaken] = []
        self.times = StepTimes()
        self._is_overlapped = self.depth > 1 and topology.pp_size == 1
        self._timing = PlanTiming(self._is_overlapped and self.device.type == "cuda")
        self.compilations = Compilations()
        self._stats = EngineStats(loaded, self.scheduler, self.times, self.compilations)
        self._expert_reports = ExpertReports(loaded.expert_loads, control, loaded.links)

    # ---- life ----------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        rank_config: RankConfig,
        topology: ParallelLayout,
        control: ControlPlane,
        tp_group: TensorParallelGroup,
        group: WorldGroup | None = None,
    ) -> Engine:
        """Load the model, size and allocate the KV cache, warm up. Collective.

        ``group`` holds all ranks of the engine; None for an engine of one rank.

        Raises:
            ConfigError: the configuration asks for what this engine cannot do.
        """
        config = rank_config.engine
        device = select_device(config, topology)
        profile = StepProfile.of_rank(rank_config, topology.rank, device)
        if profile is not None:
            # Before graphs are captured.
            profile.prepare()
        loaded = load_engine(config, topology, tp_group, device, group or WorldGroup())
        engine = cls(loaded, topology, control, profile)
        # Objects that are alive now stay: the garbage collector need not look at them again.
        gc.collect()
        gc.freeze()
        return engine

    @property
    def links(self) -> PipelineLinks:
        """Links to ranks outside of the tensor group; the caller closes them at the end."""
        return self._loaded.links

    def facts(self) -> dict[str, Any]:
        """Facts about the warm engine for front ends, logs and metrics."""
        return self._loaded.facts(self._topology)

    def stats(self) -> dict[str, float]:
        """The gauges of the last iteration, keys of ``STATS_KEYS``."""
        return self._stats.values()

    def expert_report(self) -> ExpertReport | None:
        """Tokens of each expert since the start, if a report is due and there are experts."""
        return self._expert_reports.report(is_idle=not self.has_work)

    def shutdown(self) -> None:
        """Wait for the device; nothing is launched afterwards."""
        self._in_flight.clear()
        self._requests.clear()
        self._guided.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._profile is not None:
            self._profile.close()
        self.runner.close()

    # ---- requests (rank 0) ---------------------------------------------------------------

    def submit(self, source: Hashable, message: Submit) -> None:
        """Queue a request of the connection ``source``.

        Raises:
            RequestError: this request cannot be served; nothing is queued.
        """
        try:
            request = self._checked(source, message)
        except RequestError:
            raise
        # Nothing is queued yet, so a fault in one request's values must not end the others.
        except Exception as error:
            logger.exception("request %d cannot be admitted", message.request_id)
            raise RequestError(
                f"the engine failed on this request ({error!r}), which was not begun; others "
                "go on. The server's log has the traceback.",
                ErrorKind.INTERNAL,
            ) from error
        if request.sampling.guide_type:
            self.scheduler.expect(request)
        else:
            self.scheduler.add(request)
        self._timing.submitted(time.perf_counter())
        self._requests.setdefault((source, message.request_id), []).append(request)

    def _checked(self, source: Hashable, message: Submit) -> Request:
        """A checked request with its adapter. If it has a guide, compiling has begun."""
        request = request_from(
            source,
            message,
            self._num_submitted,
            self._loaded.limits,
            self._loaded.vocab_size,
            self.runner.model.config.hidden_size,
            self.runner.model.dtype,
        )
        self.scheduler.check(request)
        request.adapter_id = self._adapters.enter(message, request)
        if "weights" in (message.adapter or {}):
            self._announce_adapter(message.adapter_id)
        self._num_submitted += 1
        if request.sampling.guide_type:
            self._guided.hold(request)
        return request

    def _is_open(self, request: Request) -> bool:
        """Whether a front end still waits for a request."""
        return request in self._requests.get((request.source, request.request_id), ())

    def cancel(self, source: Hashable, request_ids: list[int]) -> None:
        """End these requests of ``source`` as CANCELLED; unknown ids are ignored."""
        for request_id in request_ids:
            for request in self._requests.pop((source, request_id), ()):
                self._end(request, FinishReason.CANCELLED)

    def stop(self, client_id: str) -> None:
        """End the requests of this name as CANCELLED, whatever their source."""
        named = [
            r for found in self._requests.values() for r in found if r.client_id == client_id
        ]
        for request in named:
            self.cancel(request.source, [request.request_id])

    def keep_adapter(self, message: KeepAdapter) -> None:
        """Cache an adapter before any request asks for it."""
        if message.is_resent and self._adapters.digest_of(message.adapter_id):
            # The front end may hold another version, and gets the id of this version.
            self._announce_adapter(message.adapter_id)
            return
        try:
            self._adapters.keep(message.adapter_id, message.adapter)
        except RequestError as error:
            # A request that asks for it gets the error.
            logger.info("adapter %d is not kept: %s", message.adapter_id, error)
        # As in `submit`. An engine that is restarted after a crash would get it again.
        except Exception:
            logger.exception("adapter %d cannot be kept", message.adapter_id)

    def take_new_adapters(self) -> list[AdapterTaken]:
        """Adapters that came since the last call, for all front ends."""
        taken, self._taken = self._taken, []
        return taken

    def _announce_adapter(self, task: int) -> None:
        digest = self._adapters.digest_of(task)
        self._taken.append(AdapterTaken(adapter_id=task, digest=digest))

    def drop_source(self, source: Hashable) -> None:
        """A connection is gone: end its requests without a message."""
        for key in [key for key in self._requests if key[0] == source]:
            for request in self._requests.pop(key):
                self._end(request, FinishReason.CANCELLED)
                self._forget(request)
        self.scheduler.discard_ended(source)

    def _end(self, request: Request, reason: FinishReason) -> None:
        self._guided.drop(request)
        self.scheduler.end(request, reason)

    @property
    def spare_s(self) -> float:
        """Seconds that `step` can wait for requests without a gap on the device."""
        # With many running sequences a late wake-up would cost all of them, for one newcomer.
        # And while sequences wait, a newcomer would not start before them.
        if len(self.scheduler.running) > _FEW or self.scheduler.waiting:
            return 0.0
        return self._timing.spare_s(time.perf_counter())

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        has_own = bool(self._in_flight or self._guided) or self._adapters.has_ops
        return has_own or self.scheduler.has_requests

    # ---- steps ---------------------------------------------------------------------------

    def step(self) -> StepResult:
        """Run one engine step on rank 0; returns the messages for front ends."""
        start = self.times.enter(Part.SCHEDULE)
        self._stats.begin()
        result = StepResult()
        if self._guided:
            self._add_compiled(result)
        if self._profile is not None:
            self._profile.begin_step(self.scheduler.step + 1, self.times)
        untold: list[_Untold] = []
        if self._is_overlapped and self.scheduler.needs_results:
            while self._in_flight:
                untold += self._take_ids(result)
            # The device has nothing to do: messages that can wait are made after the launch.
            if any(each.has_extras for each in untold):
                self._tell(result, untold)
            start = self.times.enter(Part.SCHEDULE)
        if self.scheduler.swap_ins:
            self.scheduler.swap_ins.done_step = self.runner.loaded_step
        step = self.scheduler.schedule()
        self._fail_guided(result)
        self._move_adapters()
        if step is not None:
            self._stats.record(step)
            self.times.enter(Part.LAUNCH)
            if self._topology.world_size > 1:
                self._control.broadcast(step.decision.encode())
            output = self.runner.execute_model(step.decision)
            self.times.launched(output.marks)
            self._balance_experts()
            self._in_flight.append((step, output))
        launched = self.times.enter(Part.EMIT)
        self._tell(result, untold)
        if step is not None:
            self._timing.planned(start, launched, step.num_context_tokens)
        ended = self.scheduler.take_ended()
        if ended:
            self._emit(result, self.scheduler.step, ended)
        if self._in_flight and (step is None or len(self._in_flight) >= self.depth):
            self._take_result(result)
        elif step is None:
            self._wait_for_guides()
        return result

    def _wait_for_guides(self) -> None:
        """Nothing runs: all requests wait for guides to be compiled or for their masks."""
        if self.scheduler.wait_for_masks(_GRAMMAR_S):
            return
        if self.scheduler.has_requests:
            raise RuntimeError(
                f"{len(self.scheduler.waiting)} requests wait, nothing runs and none can start"
            )
        if self._guided:
            self._guided.sleep(_GRAMMAR_S)

    def _move_adapters(self) -> None:
        """Send adapter operations to all ranks, ahead of the step that needs the adapters.

        Adapters also arrive while the engine, or a dp rank, is idle.
        """
        if not self._adapters.has_ops:
            return
        ops = self._adapters.take_ops()
        if self._topology.world_size > 1:
            self._control.broadcast(encode_ops(ops))
        self.runner.move_adapters(ops)

    def _add_compiled(self, result: StepResult) -> None:
        """Queue the requests whose grammars are compiled; fail those whose guides cannot be."""
        for request, error in self._guided.take_compiled():
            if error is None:
                self.scheduler.add(request)
            else:
                self.scheduler.give_up(request)
                self._fail(request, error, result)

    def _fail_guided(self, result: StepResult) -> None:
        """Tell of requests that cannot go on."""
        for request, error in self.scheduler.take_failed():
            self._fail(request, error, result)

    def _fail(self, request: Request, error: RequestError, result: StepResult) -> None:
        failed = RequestFailed(
            request_id=request.request_id, kind=error.kind.name, text=str(error)
        )
        result.messages.append((request.source, failed))
        self._forget(request)

    def _take_result(self, result: StepResult) -> None:
        """Wait for the oldest step in flight, take in its ids and tell the front ends."""
        self._tell(result, self._take_ids(result))

    def _take_ids(self, result: StepResult) -> list[_Untold]:
        """Wait for the oldest step in flight and take in its ids."""
        untold: list[_Untold] = []
        step, output = self._in_flight.popleft()
        begin = self.times.enter(Part.WAIT)
        sampled = output.wait()
        end = self.times.enter(Part.EMIT)
        self._timing.arrived(end, has_waited=end - begin > _WAITED_S)
        for part, own in step.parts(sampled):
            part.logits, part.proposed = own.logits, own.proposals
            emissions = self.scheduler.update_from_output(part, own.token_ids, own.beams)
            self._stats.taken(part)
            self._fail_guided(result)
            details = StepDetails.of(part, own)
            untold.append(_Untold(step.decision.step, emissions, details))
            # The gauges refer to this step until the next one: free its logits now.
            part.logits = None
        if self._profile is not None:
            self._profile.end_step(step.decision.step)
        return untold

    def _tell(self, result: StepResult, untold: list[_Untold]) -> None:
        """Make the messages of these results, once."""
        for each in untold:
            self._emit(result, each.step, each.emissions, each.details)
        untold.clear()

    def _emit(
        self,
        result: StepResult,
        step: int,
        emissions: list[Emission],
        details: StepDetails | None = None,
    ) -> None:
        result.messages += step_outputs(step, emissions, details)
        for sequence, _, reason in emissions:
            if reason is not FinishReason.NOT_FINISHED and sequence.request.is_finished:
                self._forget(sequence.request)

    def _forget(self, request: Request) -> None:
        """Drop a request that is over; another request may have the same id."""
        key = (request.source, request.request_id)
        others = [other for other in self._requests.pop(key, ()) if other is not request]
        if others:
            self._requests[key] = others
        for sequence in request.sequences:
            if sequence.beams is not None:
                sequence.beams.forget()
        # Request and sequences refer to each other: without this only the garbage collector
        # would free them.
        request.sequences.clear()

    def follow(self, payload: bytes) -> None:
        """Carry out rank 0's decision on another rank. Collective over the tensor group."""
        if payload == REPORT_REQUEST:
            self._expert_reports.answer()
            return
        if holds_ops(payload):
            self.runner.move_adapters(decode_ops(payload))
            return
        decision = self._decode(payload)
        if self._profile is not None:
            self._profile.begin_step(decision.step)
        output = self.runner.execute_model(decision)
        # The marks' events are reused once the device has passed them.
        self.times.launched(output.marks)
        self._balance_experts()
        if self._profile is not None:
            self._profile.end_step(decision.step)

    def _balance_experts(self) -> None:
        """After a step, on every rank: experts may move between ranks."""
        if self._loaded.expert_loads is not None:
            self._loaded.expert_loads.after_step()


def _guide_compiler(loaded: LoadedEngine, topology: ParallelLayout) -> GuideCompiler | None:
    """The compiler of guides on rank 0, if guided decoding is served."""
    config = loaded.config
    if not config.guided.backend or topology.rank > 0:
        return None
    return GuideCompiler(config.guided, config.engine_dir, loaded.vocab_size)
