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
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_config import RankConfig
from trimaran.worker.engine.input_processor import GuidedRequests, request_from
from trimaran.worker.engine.interfaces import engine_parts
from trimaran.worker.engine.loading import LoadedEngine, load_engine
from trimaran.worker.engine.output_processor import EngineStats, StepDetails, step_outputs
from trimaran.worker.engine.plan_timing import PlanTiming
from trimaran.worker.engine.step_profile import StepProfile
from trimaran.worker.execution.device import select_device
from trimaran.worker.execution.step_result import ModelRunnerOutput
from trimaran.worker.experts.reports import ASK, ExpertReports
from trimaran.worker.guided.compiler import GuideCompiler
from trimaran.worker.lora.ops_message import decode_ops, encode_ops, holds_ops
from trimaran.worker.requests.request import Request
from trimaran.worker.scheduling.data_parallel import DataParallelStep
from trimaran.worker.scheduling.scheduler import Emission
from trimaran.worker.scheduling.step_plan import ScheduledStep
from trimaran.worker.steps.step_times import Part, StepTimes

logger = logging.getLogger(__name__)

_FEW = 128
"""Up to so many running sequences, a step is planned late, so that newcomers ride along."""

_GRAMMAR_S = 0.002
"""Requests that come meanwhile wait for so long, if all others wait for a grammar."""

_NOTHING_ALLOWED = (
    "no id can follow: the request's parameters (bad_words, no_repeat_ngram_size, "
    "embedding_bias, min_length, guided_decoding_guide) together forbid every id of the "
    "vocabulary. Relax one of them."
)

_WAITED_S = 0.0002
"""A result that kept the host waiting for longer was read when the device had it."""


@dataclass(slots=True)
class StepResult:
    """What a step has to tell the front ends, by connection."""

    messages: list[tuple[Any, Message]] = field(default_factory=list)
    """Sources are what the caller submitted under."""


class Engine:
    """One loop for every mode: keeps up to ``depth`` steps in flight on the device.

    Rank 0 schedules, sends each decision to the other ranks and takes in what was sampled.
    The others `follow`. Every rank of a stage samples the same ids, so none is sent back; in
    a pipeline the last stage tells rank 0. With depth 1 a step's result is known before the
    next is planned; with 2 the device has the next step before the host looks at the last
    one's ids, and a pipeline has a step for each stage.
    """

    def __init__(
        self,
        rank_config: RankConfig,
        topology: ParallelLayout,
        control: ControlPlane,
        tp_group: TensorParallelGroup,
        links: PipelineLinks | None = None,
    ) -> None:
        """``links`` tie a rank to others than its tensor group; one stage needs none."""
        self._config = rank_config.engine
        self._topology = topology
        self._control = control
        self._tp = tp_group
        self._links = links or PipelineLinks()
        self.device = select_device(self._config, topology)
        # On the CPU a step runs where the host would plan the next: overlap only delays.
        default_depth = 2 if self.device.type == "cuda" else 1
        num_stages = topology.pp_size
        self.depth = self._config.scheduler.depth or max(default_depth, num_stages)
        self._in_flight: deque[tuple[ScheduledStep | DataParallelStep, ModelRunnerOutput]] = (
            deque()
        )
        self._requests: dict[tuple[Hashable, int], list[Request]] = {}
        self._num_submitted = 0
        self._taken: list[AdapterTaken] = []
        self.times = StepTimes()
        is_overlapped = self.depth > 1 and num_stages == 1
        self._timing = PlanTiming(is_overlapped and self.device.type == "cuda")
        self._profile = StepProfile.of_rank(rank_config, topology.rank, self.device)
        self._loaded: LoadedEngine | None = None

    # ---- life ----------------------------------------------------------------------------

    def load(self) -> None:
        """Load the model, size and allocate the KV cache, warm up. Collective.

        Raises:
            ConfigError: the configuration asks for what this engine cannot do.
        """
        if self._profile is not None:
            self._profile.prepare()
        self._loaded = load_engine(
            self._config, self._topology, self._tp, self.device, self.depth, self._links
        )
        num_micro_batches = self.depth if self._topology.pp_size > 1 else 0
        parts = engine_parts(self._loaded, self._topology, self._links, num_micro_batches)
        self.runner, self.scheduler, self._adapters, self._decode = parts
        self._adapters.is_open = self._is_open
        self._guided = self._guided_requests()
        self._stats = EngineStats(self._loaded, self.scheduler, self.times)
        loads = self._loaded.expert_loads
        self._expert_reports = ExpertReports(loads, self._control, self._links)
        # What is alive now stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()

    def _guided_requests(self) -> GuidedRequests:
        config = self._config.guided
        if not config.backend or self._topology.rank > 0:
            return GuidedRequests(None)
        folder = self._config.engine_dir
        return GuidedRequests(GuideCompiler(config, folder, self._vocab_size))

    def facts(self) -> dict[str, Any]:
        """What front ends and metrics are told once the engine is warm."""
        assert self._loaded is not None
        return self._loaded.facts(self._topology, self.depth)

    def stats(self) -> dict[str, float]:
        """The gauges of the last iteration, keys of ``STATS_KEYS``."""
        return self._stats.values()

    def expert_report(self) -> ExpertReport | None:
        """Tokens of each expert since the start, if the model has any and it is time."""
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
            request = self._admitted(source, message)
        except RequestError:
            raise
        # Nothing is queued yet: a fault in one request's values is no reason to end the others.
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

    def _admitted(self, source: Hashable, message: Submit) -> Request:
        """A checked request with its adapter; one with a guide is held already."""
        assert self._loaded is not None
        request = request_from(
            source,
            message,
            self._num_submitted,
            self._loaded.limits,
            self._vocab_size,
            self.runner.model.config.hidden_size,
            self.runner.model.dtype,
        )
        self.scheduler.check(request)
        request.adapter_id = self._adapters.enter(message, request)
        if "weights" in (message.adapter or {}):
            self._tell_of(message.adapter_id)
        self._num_submitted += 1
        if request.sampling.guide_type:
            self._guided.hold(request)
        return request

    def _is_open(self, request: Request) -> bool:
        """Whether somebody still waits for a request."""
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
        """Cache an adapter that no request here has asked for yet."""
        if message.is_remembered and self._adapters.digest_of(message.adapter_id):
            # Who remembers another one is told of this one.
            self._tell_of(message.adapter_id)
            return
        try:
            self._adapters.keep(message.adapter_id, message.adapter)
        except RequestError as error:
            # Who asks for it here is told.
            logger.info("adapter %d is not kept: %s", message.adapter_id, error)
        # As of `submit`. It would be told again to whoever starts in this engine's place.
        except Exception:
            logger.exception("adapter %d cannot be kept", message.adapter_id)

    def take_taken(self) -> list[AdapterTaken]:
        """What all front ends are to know of adapters that came since the last call."""
        taken, self._taken = self._taken, []
        return taken

    def _tell_of(self, task: int) -> None:
        digest = self._adapters.digest_of(task)
        self._taken.append(AdapterTaken(adapter_id=task, digest=digest))

    def drop_source(self, source: Hashable) -> None:
        """A connection is gone: end its requests, and tell nobody."""
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
        # With many running, a late wake-up would cost all of them for one newcomer's sake; and
        # whoever waits already could not start with the newcomers.
        if len(self.scheduler.running) > _FEW or self.scheduler.waiting:
            return 0.0
        return self._timing.spare_s(time.perf_counter())

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        has_own = bool(self._in_flight or self._guided) or self._adapters.has_ops
        return has_own or self.scheduler.has_requests

    @property
    def _vocab_size(self) -> int:
        assert self._loaded is not None
        return self._loaded.vocab_size

    # ---- steps ---------------------------------------------------------------------------

    def step(self) -> StepResult:
        """Run one engine step on rank 0 and return what it has to tell."""
        start = self.times.enter(Part.SCHEDULE)
        result = StepResult()
        if self._guided:
            self._add_compiled(result)
        if self._profile is not None:
            self._profile.begin_step(self.scheduler.step + 1, self.times)
        if self.scheduler.swap_ins:
            self.scheduler.swap_ins.done_step = self.runner.loaded_step
        step = self.scheduler.schedule()
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
        if step is not None:
            self._timing.planned(start, launched, step.num_context_tokens)
        ended = self.scheduler.take_ended()
        if ended:
            self._emit(result, self.scheduler.step, ended)
        if self._in_flight and (step is None or len(self._in_flight) >= self.depth):
            self._take_result(result)
        elif step is None and self.scheduler.has_requests:
            raise RuntimeError(
                f"{len(self.scheduler.waiting)} requests wait, nothing runs and none can start"
            )
        elif step is None and self._guided:
            self._guided.sleep(_GRAMMAR_S)
        return result

    def _move_adapters(self) -> None:
        """Let all ranks know what becomes of adapters, ahead of the step that needs it; they
        come to an idle engine, or to a lane that is, too."""
        if not self._adapters.has_ops:
            return
        ops = self._adapters.take_ops()
        if self._topology.world_size > 1:
            self._control.broadcast(encode_ops(ops))
        self.runner.move_adapters(ops)

    def _add_compiled(self, result: StepResult) -> None:
        """Queue the requests whose guides have become grammars; tell whose never will."""
        for request, error in self._guided.take_compiled():
            if error is None:
                self.scheduler.add(request)
            else:
                self.scheduler.give_up(request)
                self._fail(request, error, result)

    def _fail(self, request: Request, error: RequestError, result: StepResult) -> None:
        failed = RequestFailed(
            request_id=request.request_id, kind=error.kind.name, text=str(error)
        )
        result.messages.append((request.source, failed))
        self._forget(request)

    def _take_result(self, result: StepResult) -> None:
        """Wait for the oldest step in flight and take in its ids."""
        step, output = self._in_flight.popleft()
        begin = self.times.enter(Part.WAIT)
        sampled = output.wait()
        end = self.times.enter(Part.EMIT)
        self._timing.arrived(end, has_waited=end - begin > _WAITED_S)
        for part, told in step.parts(sampled):
            part.logits = told.logits
            emissions = self.scheduler.update_from_output(part, told.token_ids, told.beams)
            for request in self.scheduler.take_failed():
                self._fail(request, RequestError(_NOTHING_ALLOWED), result)
            details = StepDetails.of(part.sampled, told)
            self._emit(result, step.decision.step, emissions, details)
            # The gauges know the last step for as long as no other comes.
            part.logits = None
        if self._profile is not None:
            self._profile.end_step(step.decision.step)

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
        """There is nothing more to tell of a request; its id may be another's too."""
        key = (request.source, request.request_id)
        others = [other for other in self._requests.pop(key, ()) if other is not request]
        if others:
            self._requests[key] = others
        for sequence in request.sequences:
            if sequence.beams is not None:
                sequence.beams.forget()
        # They refer to each other: without this they would wait for the garbage collector.
        request.sequences.clear()

    def follow(self, payload: bytes) -> None:
        """Carry out rank 0's decision on another rank. Collective over the tensor group."""
        if payload == ASK:
            self._expert_reports.answer()
            return
        if holds_ops(payload):
            self.runner.move_adapters(decode_ops(payload))
            return
        decision = self._decode(payload)
        if self._profile is not None:
            self._profile.begin_step(decision.step)
        output = self.runner.execute_model(decision)
        # Its events are used again once the device has passed them.
        self.times.launched(output.marks)
        self._balance_experts()
        if self._profile is not None:
            self._profile.end_step(decision.step)

    def _balance_experts(self) -> None:
        """Behind a step on every rank: experts may change ranks."""
        assert self._loaded is not None
        if self._loaded.expert_loads is not None:
            self._loaded.expert_loads.after_step()
