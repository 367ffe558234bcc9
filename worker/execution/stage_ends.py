"""What a rank does with the hidden states of its layers: sample from them, or pass them on."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from trimaran.comm.collectives.tensor_group import TensorParallelGroup
from trimaran.comm.stages.pipeline import PipelineLinks
from trimaran.kernels.cpu.sampling import CpuSampling
from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.execution.input_batch import InputBatch, StepInputs
from trimaran.worker.execution.kept_logits import LogitsRows
from trimaran.worker.execution.sampled_wire import encode_sampled
from trimaran.worker.execution.step_result import (
    Copier,
    LocalOutput,
    ModelRunnerOutput,
    RemoteOutput,
)
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.sampling.candidates import argmax_over_shards
from trimaran.worker.sampling.sampler import SamplerOutput, sample
from trimaran.worker.sampling.sampling_rows import SamplingBatch, SamplingRows
from trimaran.worker.steps.staging import to_device
from trimaran.worker.steps.step_times import StepMarks
from trimaran.worker.steps.step_types import KeptLogits, NewRow, SchedulerOutput

# Shapes: T tokens of the step, D hidden size, N sampled rows, S ids of this rank's shard.


class StageEnd(Protocol):
    """Behind the layers of a stage."""

    @property
    def needs_all(self) -> bool:
        """Whether it needs the hidden states of all tokens, and not just where it samples."""
        ...

    def enter(self, new: NewRow) -> None:
        """A row has a new occupant."""
        ...

    def leave(self, row: int) -> None:
        """A row's occupant is gone."""
        ...

    def finish(
        self,
        hidden_TD: Tensor,
        inputs: StepInputs,
        decision: SchedulerOutput,
        marks: StepMarks,
    ) -> ModelRunnerOutput:
        """End a step whose layers have run. Collective over the tensor group."""
        ...


def stage_end(
    model: CausalLM,
    inputs: InputBatch | DeviceInputs,
    vocab_size: int,
    tp: TensorParallelGroup,
    depth: int,
    kernel: CpuSampling | None,
    links: PipelineLinks,
) -> StageEnd:
    """What comes behind the layers of this rank's stage."""
    if model.stage.is_last:
        return LastStage(model, inputs, vocab_size, tp, depth, kernel, links)
    return EarlierStage(links)


class EarlierStage:
    """Sends hidden states to the next stage. What they became there, rank 0 is told."""

    needs_all = True

    def __init__(self, links: PipelineLinks) -> None:
        assert links.next is not None, "an earlier stage has one behind it"
        self._next = links.next
        # Of the only pipeline that this rank is in.
        self._reader = next(iter(links.readers.values()), None)

    def enter(self, new: NewRow) -> None:
        """Nothing of a row is needed here."""

    def leave(self, row: int) -> None:
        """Nothing of a row is kept here."""

    def finish(
        self,
        hidden_TD: Tensor,
        inputs: StepInputs,
        decision: SchedulerOutput,
        marks: StepMarks,
    ) -> ModelRunnerOutput:
        """Hand the hidden states on."""
        self._next.send(hidden_TD)
        marks.end()
        return RemoteOutput(self._reader, decision.step, marks)


class LastStage:
    """Computes logits and samples. Ids stay on the device for the next step, and are the same
    on every rank; in a pipeline tensor rank 0 tells rank 0 of them."""

    def __init__(
        self,
        model: CausalLM,
        inputs: InputBatch | DeviceInputs,
        vocab_size: int,
        tp: TensorParallelGroup,
        depth: int,
        kernel: CpuSampling | None,
        links: PipelineLinks,
    ) -> None:
        num_rows = len(inputs.num_prompt_tokens)
        self._model = model
        self._inputs = inputs
        self._tp = tp
        self._writer = links.writer
        self._is_first_lane = links.is_first_lane
        self._sampling = SamplingRows(num_rows, vocab_size, inputs.device, kernel)
        self._logits_rows = LogitsRows(num_rows, vocab_size, is_keeper=tp.rank == 0)
        self._copier: Copier | None = None
        if inputs.device.type == "cuda":
            self._copier = Copier(inputs.device, num_rows, depth)

    @property
    def needs_all(self) -> bool:
        """Whether a row wants the logits of its prompt."""
        return not self._logits_rows.is_empty

    def enter(self, new: NewRow) -> None:
        """Note what a row's new occupant asks of sampling."""
        self._sampling.enter(new)
        self._logits_rows.enter(new)

    def leave(self, row: int) -> None:
        """Forget what a row asked."""
        self._sampling.leave(row)
        self._logits_rows.leave(row)

    def finish(
        self,
        hidden_TD: Tensor,
        inputs: StepInputs,
        decision: SchedulerOutput,
        marks: StepMarks,
    ) -> ModelRunnerOutput:
        """Sample, and start what brings the ids to the host."""
        output = self._result(hidden_TD, inputs, decision, marks)
        # Of steps that warm up, which have no number, rank 0 awaits its own lane's alone.
        if self._writer is not None and (decision.step or self._is_first_lane):
            # A closure of this step's own: the writer may read it after the next has begun.
            self._writer.post(
                lambda: self._message(decision.step, output), is_ready=self._copier is None
            )
        return output

    def _message(self, step: int, output: LocalOutput) -> bytes:
        if self._copier is not None:
            # The writer's thread would wait on the first GPU, and take memory there.
            torch.cuda.set_device(self._inputs.device)
        return encode_sampled(step, output.wait())

    def _result(
        self,
        hidden_TD: Tensor,
        inputs: StepInputs,
        decision: SchedulerOutput,
        marks: StepMarks,
    ) -> LocalOutput:
        kept: KeptLogits | None = None
        if not self._logits_rows.is_empty:
            kept = KeptLogits()
            self._logits_rows.keep_context(
                decision, hidden_TD, self._model.compute_logits, kept
            )
        if len(decision.sampled) == 0:
            marks.end()
            nothing = torch.empty(0, dtype=torch.int64)
            return LocalOutput(SamplerOutput(nothing), nothing, None, marks)
        marks.sampling()
        sampled = self._sample(hidden_TD, inputs, decision, kept)
        told_ids = sampled.told_ids()
        marks.end()
        return LocalOutput(sampled, told_ids, self._copier, marks, kept)

    def _sample(
        self,
        hidden_TD: Tensor,
        inputs: StepInputs,
        decision: SchedulerOutput,
        kept: KeptLogits | None,
    ) -> SamplerOutput:
        sampled = decision.sampled
        if inputs.logits_indices is not None:
            hidden_TD = hidden_TD.index_select(0, inputs.logits_indices)
        # A GPU's draw takes the likeliest id along, in one pass.
        is_gpu = inputs.sampled_rows is not None
        if is_gpu or self._sampling.has_wants:
            lengths = (decision.num_computed_tokens + decision.num_scheduled_tokens)[sampled]
            batch = self._sampling.batch(
                decision.rows[sampled], lengths, inputs.sampled_rows, inputs.sampled_lengths
            )
            if len(decision.masks):
                words = -(-self._sampling.vocab_size // 32)
                batch.masks = to_device(decision.masks.reshape(-1, words), self._inputs.device)
            if is_gpu and self._tp.size > 1 and batch.is_mostly_plain:
                output = self._sample_over_shards(hidden_TD, batch)
            else:
                logits_NV = self._model.compute_logits(hidden_TD)
                if kept is not None:
                    self._logits_rows.keep_generation(decision, logits_NV, kept)
                output = sample(logits_NV, batch, self._inputs.token_table)
        else:
            output = SamplerOutput(self._likeliest(hidden_TD))
        self._inputs.write_sampled(inputs, output.token_ids)
        return output

    def _likeliest(self, hidden_ND: Tensor) -> Tensor:
        """The likeliest ids, without gathering logits. Collective over the tensor group."""
        if self._tp.size == 1:
            return self._sampling.likeliest(self._model.compute_logits(hidden_ND))
        logits_NS, first_id = self._shard_logits(hidden_ND)
        return argmax_over_shards(logits_NS, first_id, self._tp)

    def _sample_over_shards(self, hidden_ND: Tensor, batch: SamplingBatch) -> SamplerOutput:
        """What GPUs sample without gathering the logits of plain rows. Collective."""
        # Imported only now: a CPU needs no Triton.
        from trimaran.worker.sampling.device_sampler import sample_over_shards

        head, table = self._model.lm_head, self._inputs.token_table
        logits_NS = head.local_logits(hidden_ND)
        return sample_over_shards(logits_NS, head.first_row, batch, table, self._tp)

    def _shard_logits(self, hidden_ND: Tensor) -> tuple[Tensor, int]:
        """This rank's logits, and the first of the ids that they are of."""
        head = self._model.lm_head
        # The last shards may hold padding rows, which are no ids.
        num_real = min(max(head.vocab_size - head.first_row, 0), head.num_rows)
        return head.local_logits(hidden_ND)[:, :num_real], head.first_row
