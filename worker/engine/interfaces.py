"""What an engine is put together from: for one lane, or for several that step together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from trimaran.comm.stages.pipeline import PipelineLinks
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.engine.loading import LoadedEngine
from trimaran.worker.execution.data_parallel_runner import LaneRunner
from trimaran.worker.execution.step_result import ModelRunnerOutput
from trimaran.worker.kv_cache.kv_group import KVGroup
from trimaran.worker.lora.manager import AdapterManager
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.scheduling.data_parallel import DataParallelAdapters, DataParallelScheduler
from trimaran.worker.scheduling.scheduler import Scheduler
from trimaran.worker.steps.lane_decisions import LaneDecisions
from trimaran.worker.steps.step_types import SchedulerOutput


class RunsSteps(Protocol):
    """A `ModelRunner` or a `LaneRunner`, with the kind of decisions that it takes."""

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
        """The last step whose copies from the host are made, with all before it."""
        ...

    def move_adapters(self, ops: list[Any]) -> None:
        """Carry out what becomes of adapters before the next step."""
        ...

    def execute_model(self, decision: Any) -> ModelRunnerOutput:
        """Launch one step."""
        ...

    def close(self) -> None:
        """Free what must be freed before the tensor group's communicator."""
        ...


class EngineParts(NamedTuple):
    """Who runs steps, who decides them, and how decisions are read."""

    runner: RunsSteps
    scheduler: Scheduler | DataParallelScheduler
    adapters: AdapterManager | DataParallelAdapters
    decode: Callable[[bytes], SchedulerOutput | LaneDecisions]


def engine_parts(
    loaded: LoadedEngine,
    topology: ParallelLayout,
    links: PipelineLinks,
    num_micro_batches: int,
) -> EngineParts:
    """The parts of a loaded engine."""
    schedulers = [
        Scheduler(loaded.limits, cache, adapters, num_micro_batches)
        for cache, adapters in zip(loaded.caches, loaded.adapters, strict=True)
    ]
    if topology.dp_size == 1:
        return EngineParts(
            loaded.runner, schedulers[0], loaded.adapters[0], SchedulerOutput.decode
        )
    return EngineParts(
        LaneRunner(loaded.runner, topology, links),
        DataParallelScheduler(schedulers),
        DataParallelAdapters(loaded.adapters),
        LaneDecisions.decode,
    )
