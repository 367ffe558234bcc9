"""Runs one dp rank's part of a step, and joins the other ranks in layers of shared experts."""

from __future__ import annotations

from typing import Any

import torch

from trimaran.comm.control.result_link import ResultReader
from trimaran.comm.stages.pipeline import PipelineLinks
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.execution.model_runner import ModelRunner
from trimaran.worker.execution.step_result import ModelRunnerOutput, RemoteOutput
from trimaran.worker.kv_cache.kv_group import KVGroup
from trimaran.worker.layers.experts import ExpertMLP
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.steps.data_parallel_decisions import DataParallelDecisions
from trimaran.worker.steps.step_times import DeviceClock, StepMarks
from trimaran.worker.steps.step_types import SampledTokens


class DataParallelRunner:
    """The `ModelRunner` of one dp rank, given the decisions of all dp ranks.

    If dp ranks share experts, all of them enter each expert layer of a step, with tokens or
    without.
    """

    def __init__(
        self, runner: ModelRunner, topology: ParallelLayout, links: PipelineLinks
    ) -> None:
        self._runner = runner
        self._dp_rank = topology.dp_rank
        self._mixtures: list[ExpertMLP] = []
        if links.expert_ranks is not None:
            modules = runner.model.modules()
            self._mixtures = [each for each in modules if isinstance(each, ExpertMLP)]
        self._bound = runner.model.context.tokens_across_dp
        self._clock = DeviceClock(runner.inputs.device)
        self._readers: list[ResultReader | None] = [
            links.readers.get(topology.output_rank_of(rank)) for rank in range(topology.dp_size)
        ]
        """On rank 0, by dp rank, the reader of its results; None for a dp rank whose results
        are in this process."""

    @property
    def model(self) -> CausalLM:
        """This rank's part of the model."""
        return self._runner.model

    @property
    def groups(self) -> list[KVGroup]:
        """This rank's KV cache."""
        return self._runner.groups

    @property
    def loaded_step(self) -> int:
        """The last step of this dp rank whose copies from the host cache are complete."""
        return self._runner.loaded_step

    def close(self) -> None:
        """Free the runner's resources. Before the tensor group's communicator is closed."""
        self._runner.close()

    def move_adapters(self, ops: list[Any]) -> None:
        """Carry out this dp rank's adapter operations; ``ops`` are those of all dp ranks."""
        self._runner.move_adapters(ops[self._dp_rank])

    def execute_model(self, decision: DataParallelDecisions) -> ModelRunnerOutput:
        """Launch one step. Collective over all dp ranks that share experts."""
        own = decision.by_dp_rank[self._dp_rank]
        if self._mixtures:
            most = max(rank.num_tokens for rank in decision.by_dp_rank if rank is not None)
            # All ranks must exchange the same number of tokens, whether they run graphs or not.
            self._bound.most_tokens = self._runner.graph_size(most) or most
        if own is None:
            outcome: ModelRunnerOutput | None = None
            marks = self._run_without_tokens()
        else:
            outcome = self._runner.execute_model(own)
            marks = outcome.marks
        outputs: list[ModelRunnerOutput] = []
        for rank, one in enumerate(decision.by_dp_rank):
            if one is None:
                continue
            is_here = rank == self._dp_rank and self._readers[rank] is None
            if is_here and outcome is not None:
                outputs.append(outcome)
            else:
                outputs.append(RemoteOutput(self._readers[rank], one.step, marks))
        return DataParallelOutput(outputs, marks)

    @torch.inference_mode()
    def _run_without_tokens(self) -> StepMarks:
        marks = self._clock.begin()
        for mixture in self._mixtures:
            mixture.forward_without_tokens()
        marks.end()
        return marks


class DataParallelOutput:
    """The sampled ids of all dp ranks in one step, possibly still on the device."""

    __slots__ = ("_outputs", "marks")

    def __init__(self, outputs: list[ModelRunnerOutput], marks: StepMarks) -> None:
        self._outputs = outputs
        self.marks = marks

    def wait(self) -> SampledTokens:
        """The sampled ids by dp rank. Call once; waits until all are on the host."""
        return SampledTokens(token_ids=[], by_dp_rank=[each.wait() for each in self._outputs])
