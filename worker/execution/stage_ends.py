"""The end of a stage's step: the last stage samples and keeps logits, others send states on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from trimaran.comm.collectives.tensor_group import TensorParallelGroup
from trimaran.comm.stages.pipeline import PipelineLinks
from trimaran.kernels.cpu.sampling import CpuSampling
from trimaran.worker.attention.taps import LayerTaps
from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.execution.draft_runner import DraftRunner
from trimaran.worker.execution.input_batch import InputBatch, StepInputs
from trimaran.worker.execution.step_result import (
    Copier,
    LocalOutput,
    ModelRunnerOutput,
    RemoteOutput,
    encode_sampled,
)
from trimaran.worker.execution.tree_paths import DeviceTreePaths, TreePaths, table_of_paths
from trimaran.worker.kv_cache.kv_group import KVGroup
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.sampling.outputs import SamplerOutput
from trimaran.worker.sampling.sampler import make_sampler
from trimaran.worker.sampling.sampling_rows import READS_IDS, SamplingRows
from trimaran.worker.steps.staging import to_device
from trimaran.worker.steps.step_times import StepMarks
from trimaran.worker.steps.step_types import KeptLogits, NewRow, SchedulerOutput

if TYPE_CHECKING:
    from trimaran.worker.execution.whole_steps import WholeSteps

# Shapes: T tokens of the step, N sampled rows, P tokens of a prompt, V vocabulary.

_CHUNK_BYTES = 32 << 20
"""Most logits of a prompt that are on the device at once, as float32."""


@dataclass(slots=True)
class _Context:
    dtype: torch.dtype
    chunks: list[Tensor] = field(default_factory=list)


class LogitsRows:
    """The rows whose logits are kept. A step without such rows costs nothing here.

    All ranks compute logits, because shards must be gathered; rank 0 of the tensor group keeps
    them.
    """

    def __init__(self, max_rows: int, vocab_size: int, *, is_keeper: bool) -> None:
        self._context: dict[int, _Context] = {}
        self._generation: dict[int, torch.dtype] = {}
        self._is_keeper = is_keeper
        # No more rows than a step's sampling has memory for.
        self._chunk_rows = max(1, min(max_rows, _CHUNK_BYTES // (4 * vocab_size)))

    @property
    def is_empty(self) -> bool:
        """Whether no row keeps logits."""
        return not self._context and not self._generation

    def enter(self, new: NewRow) -> None:
        """Record which logits the sequence in a row asks for."""
        sampling = new.sampling
        dtype: torch.dtype = getattr(torch, sampling.get("logits_dtype", "float32"))
        if sampling.get("return_generation_logits"):
            self._generation[new.row] = dtype
        # A sequence that resumes with output has sent the logits of its prompt before.
        is_prompt = len(new.token_ids) == new.num_prompt_tokens
        if sampling.get("return_context_logits") and is_prompt:
            self._context[new.row] = _Context(dtype)

    def leave(self, row: int) -> None:
        """Drop the logits of the sequence that left this row."""
        self._context.pop(row, None)
        self._generation.pop(row, None)

    def keep_context(
        self,
        decision: SchedulerOutput,
        hidden_TD: Tensor,
        compute_logits: Callable[[Tensor], Tensor],
        kept: KeptLogits,
    ) -> None:
        """Compute the logits of prompt tokens in this step. Collective over the group.

        They are kept until the prompt is complete, and then go to ``kept``.
        """
        if not self._context:
            return
        starts = np.cumsum(decision.num_scheduled_tokens) - decision.num_scheduled_tokens
        index_of = {int(entry): index for index, entry in enumerate(decision.sampled)}
        for entry, row in enumerate(decision.rows.tolist()):
            context = self._context.get(row)
            if context is None:
                continue
            first = int(starts[entry])
            end = first + int(decision.num_scheduled_tokens[entry])
            for start in range(first, end, self._chunk_rows):
                logits = compute_logits(hidden_TD[start : min(start + self._chunk_rows, end)])
                if self._is_keeper:
                    context.chunks.append(_to_host(logits, context.dtype))
            if entry in index_of:
                kept.context[index_of[entry]] = context.chunks
                del self._context[row]

    def keep_generation(
        self, decision: SchedulerOutput, logits_NV: Tensor, kept: KeptLogits
    ) -> None:
        """Keep the logits from which this step samples, before they are processed."""
        if not self._generation or not self._is_keeper:
            return
        for index, row in enumerate(decision.rows[decision.sampled].tolist()):
            dtype = self._generation.get(row)
            if dtype is not None:
                kept.generation[index] = _to_host(logits_NV[index], dtype)


def _to_host(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy on the host, complete once the device has reached it."""
    if not logits.is_cuda:
        return logits.to(dtype, copy=True)
    # On the step's own stream: a later copy would hold the device's memory for longer.
    host = torch.empty(logits.shape, dtype=dtype, pin_memory=True)
    return host.copy_(logits.to(dtype), non_blocking=True)


# Shapes: T tokens of the step, D hidden size, N sampled rows, S ids of this rank's shard.


class StageEnd(Protocol):
    """What follows the layers of a pipeline stage."""

    @property
    def needs_all(self) -> bool:
        """Whether the hidden states of all tokens are needed, rather than of sampled tokens."""
        ...

    def whole_steps(self) -> WholeSteps | None:
        """The steps that graphs hold from the layers to the ids; None if there are none."""
        ...

    def enter(self, new: NewRow) -> None:
        """Take in the sequence that enters a row."""
        ...

    def leave(self, row: int) -> None:
        """Drop the sequence that left a row."""
        ...

    def rewrite(self, decision: SchedulerOutput) -> None:
        """Take note of ids that the decision replaces."""
        ...

    def finish(
        self,
        hidden_TD: Tensor,
        inputs: StepInputs,
        decision: SchedulerOutput,
        marks: StepMarks,
    ) -> ModelRunnerOutput:
        """End a step after its layers. Collective over the tensor group."""
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
    """The end of this rank's stage."""
    if model.stage.is_last:
        return LastStage(model, inputs, vocab_size, tp, depth, kernel, links)
    return EarlierStage(links)


class EarlierStage:
    """Sends hidden states to the next stage; the last stage sends the result to rank 0."""

    needs_all = True

    def __init__(self, links: PipelineLinks) -> None:
        assert links.next is not None, "an earlier stage has one behind it"
        self._next = links.next
        # Earlier stages are in one pipeline, so they have one reader at most.
        self._reader = next(iter(links.readers.values()), None)
        self.taps: LayerTaps | None = None
        """Inputs of layers that the last stage's network reads."""

    def whole_steps(self) -> WholeSteps | None:
        """None: no ids are sampled here."""
        return None

    def enter(self, new: NewRow) -> None:
        """Do nothing: no row's data is needed here."""

    def leave(self, row: int) -> None:
        """Do nothing: no row's data is kept here."""

    def rewrite(self, decision: SchedulerOutput) -> None:
        """Do nothing: no row's data is kept here."""

    def finish(
        self,
        hidden_TD: Tensor,
        inputs: StepInputs,
        decision: SchedulerOutput,
        marks: StepMarks,
    ) -> ModelRunnerOutput:
        """Send the hidden states to the next stage."""
        self._next.send(hidden_TD if self.taps is None else self.taps.join(hidden_TD))
        marks.end()
        return RemoteOutput(self._reader, decision.step, marks)


class LastStage:
    """Computes logits and samples. Ids stay on the device for the next step, and are equal on
    all ranks; in a pipeline, tensor rank 0 sends them to rank 0."""

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
        self._is_first_dp_rank = links.is_first_dp_rank
        self._sampler = make_sampler(inputs.device, tp)
        self._sampling = SamplingRows(num_rows, vocab_size, inputs.device, kernel)
        self._logits_rows = LogitsRows(num_rows, vocab_size, is_keeper=tp.rank == 0)
        self.drafting: DraftRunner | None = None
        """Runs a network that drafts, after each step."""
        self.trees: TreePaths | DeviceTreePaths | None = None
        """Follows accepted paths, if drafts are trees."""
        self.groups: list[KVGroup] = []
        """The target's caches, in which accepted paths are moved."""
        self.draft_groups: list[KVGroup] = []
        """The caches of the network that drafts."""
        self._copier: Copier | None = None
        if inputs.device.type == "cuda":
            most = inputs.most_sampled if isinstance(inputs, DeviceInputs) else num_rows
            self._copier = Copier(inputs.device, most, depth)

    def whole_steps(self) -> WholeSteps | None:
        """The steps that graphs hold from the layers to the ids; None if more follows than a
        graph can hold, or if other ranks take part in it."""
        inputs = self._inputs
        has_followers = self.drafting is not None or self.trees is not None
        if has_followers or self._tp.size > 1 or self._writer is not None:
            return None
        if not isinstance(inputs, DeviceInputs):
            return None
        # Imported late, because a CPU needs no Triton.
        from trimaran.worker.execution.whole_steps import WholeSteps

        return WholeSteps(self._model, inputs, self._sampling, self._copier)

    @property
    def needs_all(self) -> bool:
        """Whether a row keeps the logits of its prompt, or a network drafts from all states."""
        has_drafter = self.drafting is not None and self.drafting.needs_states
        return has_drafter or not self._logits_rows.is_empty

    def enter(self, new: NewRow) -> None:
        """Take in the sampling parameters of the sequence that enters a row."""
        self._sampling.enter(new)
        self._logits_rows.enter(new)

    def leave(self, row: int) -> None:
        """Drop the sampling parameters of the sequence that left a row."""
        self._sampling.leave(row)
        self._logits_rows.leave(row)

    def rewrite(self, decision: SchedulerOutput) -> None:
        """Take note of ids that the decision replaces."""
        if not self._sampling.ngrams:
            return
        for write in decision.token_writes:
            self._sampling.rewrite(write.row, write.start)
        end = decision.num_decodes
        given = slice(end - max(len(decision.decode_ids), decision.num_drafts), end)
        rows, starts = decision.rows[given], decision.num_computed_tokens[given]
        for row, start in zip(rows.tolist(), starts.tolist(), strict=True):
            self._sampling.rewrite(row, start)

    def finish(
        self,
        hidden_TD: Tensor,
        inputs: StepInputs,
        decision: SchedulerOutput,
        marks: StepMarks,
    ) -> ModelRunnerOutput:
        """Sample, and start the copy of the ids to the host."""
        output = self._result(hidden_TD, inputs, decision, marks)
        # Warm-up steps have no number; rank 0 awaits the results of its own dp rank's alone.
        if self._writer is not None and (decision.step or self._is_first_dp_rank):
            # The writer may call this after the next step began, so it holds this step's
            # output.
            self._writer.post(
                lambda: self._message(decision.step, output), is_ready=self._copier is None
            )
        return output

    def _message(self, step: int, output: LocalOutput) -> bytes:
        if self._copier is not None:
            # A new thread's current device is the first GPU, where it would take memory.
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
            if self.drafting is not None:
                self.drafting.follow(hidden_TD, inputs, decision)
            marks.end()
            nothing = torch.empty(0, dtype=torch.int64)
            return LocalOutput(SamplerOutput(nothing), nothing, None, marks)
        marks.sampling()
        wanted_ND = hidden_TD
        if inputs.logits_indices is not None:
            wanted_ND = hidden_TD.index_select(0, inputs.logits_indices)
        sampled = self._sample(wanted_ND, inputs, decision, kept)
        ids_for_host = sampled.ids_for_host()
        trees = self.trees if len(decision.tree_runs) else None
        if trees is not None:
            trees.accept(inputs, decision, sampled.token_ids)
            trees.move(self.groups, inputs.slot_mappings)
        proposals = None
        if self.drafting is not None:
            # The table has the ids of accepted paths: the network reads no others.
            self.drafting.follow(hidden_TD, inputs, decision)
            if trees is not None:
                slots = inputs.slot_mappings[:1] * len(self.draft_groups)
                trees.move(self.draft_groups, slots)
            proposals = self.drafting.propose(wanted_ND, inputs, decision, sampled.token_ids)
        if proposals is not None:
            proposals = _to_host(proposals, torch.int32)
        marks.end()
        return LocalOutput(sampled, ids_for_host, self._copier, marks, kept, proposals)

    def _sample(
        self,
        hidden_ND: Tensor,
        inputs: StepInputs,
        decision: SchedulerOutput,
        kept: KeptLogits | None,
    ) -> SamplerOutput:
        sampled = decision.sampled
        ends = decision.num_computed_tokens + decision.num_scheduled_tokens
        hidden = decision.hidden_rows
        lengths = (ends - hidden if len(hidden) else ends)[sampled]
        batch = self._sampling.batch(
            decision.rows[sampled], lengths, inputs.sampled_rows, inputs.sampled_lengths
        )
        if len(decision.masks):
            words = -(-self._sampling.vocab_size // 32)
            batch.masks = to_device(decision.masks.reshape(-1, words), self._inputs.device)
        batch.draft_rules = decision.draft_rules
        table = self._inputs.token_table
        if len(hidden) and batch.all_features & READS_IDS:
            table = table_of_paths(table, inputs, decision, batch)
        if self._tp.size > 1 and self._sampler.takes_shards(batch):
            head = self._model.lm_head
            logits_NS = head.local_logits(hidden_ND)
            output = self._sampler.sample_shards(logits_NS, head.first_row, batch, table)
        else:
            logits_NV = self._model.compute_logits(hidden_ND)
            if kept is not None:
                self._logits_rows.keep_generation(decision, logits_NV, kept)
            output = self._sampler.sample(logits_NV, batch, table)
        self._inputs.write_sampled(inputs, output.token_ids)
        # The decision may replace draft tokens that this step verified.
        self.rewrite(decision)
        return output
