"""The interfaces of scheduler, adapters and runner, of one dp rank or of all.

`Scheduler`, `AdapterManager` and `ModelRunner` serve these interfaces without data parallelism.
With several dp ranks the classes of `scheduling.data_parallel` and of
`execution.data_parallel_runner` hold one of each per rank. The engine uses only interfaces.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as List
from typing import Any, NamedTuple, Protocol

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import FinishReason, Submit
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.engine.loading import LoadedEngine
from trimaran.worker.execution.data_parallel_runner import DataParallelRunner
from trimaran.worker.execution.step_result import ModelRunnerOutput
from trimaran.worker.kv_cache.kv_group import KVGroup
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.requests.request import Request, Sequence
from trimaran.worker.sampling.beam_search import Candidates
from trimaran.worker.scheduling.data_parallel import DataParallelAdapters, DataParallelScheduler
from trimaran.worker.scheduling.preemption import PreemptionCounts
from trimaran.worker.scheduling.resources import SwapIns
from trimaran.worker.scheduling.scheduler import Scheduler
from trimaran.worker.scheduling.step_plan import Emission, ScheduledStep
from trimaran.worker.speculation.draft_counts import DraftCounts
from trimaran.worker.steps.data_parallel_decisions import DataParallelDecisions
from trimaran.worker.steps.step_types import SampledTokens, SchedulerOutput


class StepRunner(Protocol):
    """Runs steps on this rank, by the decisions of the scheduler of the same rank."""

    @property
    def model(self) -> CausalLM:
        """This rank's part of the model."""
        ...

    @property
    def groups(self) -> list[KVGroup]:
        """This rank's KV cache."""
        ...

    @property
    def loaded_step(self) -> int:
        """The last step whose copies from the host are complete, like those of all earlier
        steps."""
        ...

    def move_adapters(self, ops: list[Any]) -> None:
        """Carry out the operations of `StepAdapters.take_ops` before the next step."""
        ...

    def execute_model(self, decision: Any) -> ModelRunnerOutput:
        """Launch one step."""
        ...

    def close(self) -> None:
        """Free the runner's resources. Before the tensor group's communicator is closed."""
        ...


class EngineStep(Protocol):
    """A scheduled step: the decision for the ranks, and the sequences in it."""

    @property
    def decision(self) -> SchedulerOutput | DataParallelDecisions:
        """The decision that all ranks carry out."""
        ...

    @property
    def num_context(self) -> int:
        """Sequences that compute prompt tokens."""
        ...

    @property
    def num_context_tokens(self) -> int:
        """Prompt tokens that they compute."""
        ...

    @property
    def num_scheduled(self) -> int:
        """Sequences that compute tokens; beams of one request count once."""
        ...

    @property
    def num_generation_tokens(self) -> int:
        """Ids that the step samples for outputs, or finds as candidates of beams."""
        ...

    def parts(self, sampled: SampledTokens) -> list[tuple[ScheduledStep, SampledTokens]]:
        """The steps that `StepScheduler.update_from_output` takes, with their sampled ids."""
        ...


class StepScheduler(Protocol):
    """Decides steps on rank 0; `Scheduler` has the contracts."""

    step: int
    config: SchedulerConfig

    @property
    def running(self) -> list[Sequence]:
        """Sequences with a row."""
        ...

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences without a row."""
        ...

    @property
    def swap_ins(self) -> SwapIns:
        """Sequences whose prefix is being copied from the host cache."""
        ...

    @property
    def preemptions(self) -> PreemptionCounts:
        """Preempted sequences, now and since the start."""
        ...

    @property
    def has_requests(self) -> bool:
        """Whether any sequence runs or waits, or an end is to be sent."""
        ...

    def wait_for_masks(self, seconds: float) -> bool:
        """Wait for any mask of a guide, at most this long; False if none is awaited."""
        ...

    @property
    def num_active(self) -> int:
        """Sequences that run, wait or are expected."""
        ...

    @property
    def num_empty_slots(self) -> int:
        """Sequences of static batches that have ended before others of theirs."""
        ...

    @property
    def micro_batch(self) -> int:
        """The last step's place among the steps in flight of a pipeline."""
        ...

    def check(self, request: Request) -> None:
        """Refuse a request that cannot be admitted, by `RequestError`."""
        ...

    def expect(self, request: Request) -> None:
        """Count a checked request as waiting until it is added, ended or given up."""
        ...

    def give_up(self, request: Request) -> None:
        """Count a request that was expected no more."""
        ...

    def add(self, request: Request) -> None:
        """Queue a checked request."""
        ...

    def end(self, request: Request, reason: FinishReason) -> None:
        """End all of a request's sequences now."""
        ...

    def take_failed(self) -> list[tuple[Request, RequestError]]:
        """Requests without a next id, or with a slow guide, once each."""
        ...

    def take_ended(self) -> list[Emission]:
        """The ends that no step's result brought, once each."""
        ...

    def discard_ended(self, source: Hashable) -> None:
        """Forget the ends that were to be sent to a connection that is gone."""
        ...

    @property
    def draft_counts(self) -> DraftCounts:
        """Draft tokens since the start."""
        ...

    @property
    def needs_results(self) -> bool:
        """Whether to await the results of all steps before the next `schedule`."""
        ...

    def schedule(self) -> EngineStep | None:
        """Decide the next step; None if there is nothing to compute."""
        ...

    def update_from_output(
        self, step: ScheduledStep, token_ids: List[int], candidates: List[Candidates] = ()
    ) -> list[Emission]:
        """Take in the sampled ids of one of a step's parts."""
        ...


class StepAdapters(Protocol):
    """The adapter caches on rank 0; `AdapterManager` has the contracts."""

    is_open: Callable[[Request], bool]

    @property
    def has_ops(self) -> bool:
        """Whether there are adapter operations to send to ranks."""
        ...

    def take_ops(self) -> list[Any]:
        """The operations that ranks carry out before the next step."""
        ...

    def enter(self, message: Submit, request: Request) -> int:
        """The number of the adapter that a request asks for; 0 for none."""
        ...

    def digest_of(self, task: int) -> bytes:
        """The digest of an adapter's content; empty if it is not here."""
        ...

    def keep(self, task: int, given: dict[str, Any]) -> object:
        """Cache an adapter; the engine ignores the result."""
        ...


class EngineParts(NamedTuple):
    """The parts that the engine steps, and how followers read decisions."""

    runner: StepRunner
    scheduler: StepScheduler
    adapters: StepAdapters
    decode: Callable[[bytes], SchedulerOutput | DataParallelDecisions]


def engine_parts(loaded: LoadedEngine, topology: ParallelLayout) -> EngineParts:
    """The parts of a loaded engine. A single dp rank needs no wrapper for several ranks."""
    num_micro_batches = loaded.depth if topology.pp_size > 1 else 0
    schedulers = [
        Scheduler(loaded.limits, cache, adapters, num_micro_batches)
        for cache, adapters in zip(loaded.caches, loaded.adapters, strict=True)
    ]
    if topology.dp_size == 1:
        return EngineParts(
            loaded.runner, schedulers[0], loaded.adapters[0], SchedulerOutput.decode
        )
    return EngineParts(
        DataParallelRunner(loaded.runner, topology, loaded.links),
        DataParallelScheduler(schedulers),
        DataParallelAdapters(loaded.adapters),
        DataParallelDecisions.decode,
    )
