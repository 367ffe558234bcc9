"""Runs one decided step on this rank: inputs, forward pass, sampling, copy back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.comm.collectives import TensorParallelGroup
from trimaran.kernels.sampling import CpuSampling
from trimaran.worker.attention.backend import (
    AttentionMetadata,
    ForwardContext,
    KVCacheSpec,
)
from trimaran.worker.candidates import argmax_over_shards
from trimaran.worker.input_batch import InputBatch, StepInputs
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.sampler import SamplerOutput, sample
from trimaran.worker.sampling_rows import SamplingRows
from trimaran.worker.staging import to_device
from trimaran.worker.step_times import DeviceClock, StepMarks
from trimaran.worker.step_types import SampledTokens, SchedulerOutput


class ModelRunnerOutput:
    """One step's result, maybe still on its way from the device."""

    __slots__ = ("_event", "_log_probs", "_token_ids", "marks")

    def __init__(
        self, output: SamplerOutput, copy_stream: torch.cuda.Stream | None, marks: StepMarks
    ) -> None:
        self.marks = marks
        self._token_ids = output.token_ids
        self._log_probs = output.log_probs
        self._event: torch.cuda.Event | None = None
        if copy_stream is not None:
            self._start_copy(copy_stream)

    def _start_copy(self, copy_stream: torch.cuda.Stream) -> None:
        # A stream of its own: the copy waits for the sampler, and the next step not for it.
        copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copy_stream):
            self._token_ids = _copy_back(self._token_ids, copy_stream)
            if self._log_probs is not None:
                self._log_probs = _copy_back(self._log_probs, copy_stream)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(copy_stream)

    def wait(self) -> SampledTokens:
        """The sampled ids on the host. Blocks until the device has them."""
        if self._event is not None:
            self._event.synchronize()
        return SampledTokens(
            token_ids=self._token_ids.tolist(),
            log_probs=None if self._log_probs is None else self._log_probs.tolist(),
        )


def _copy_back(tensor: Tensor, copy_stream: torch.cuda.Stream) -> Tensor:
    # The sampler's memory must not be reused before the copy has read it.
    tensor.record_stream(copy_stream)
    # torch keeps a pool of pinned memory, so this is no system call after warm-up.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class KVGroup:
    """Layers with equal specs, and their one pool of blocks, block-major."""

    def __init__(self, spec: KVCacheSpec, layers: list[int]) -> None:
        self.spec = spec
        self.layers = layers
        self.pool: Tensor | None = None

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers of the group."""
        return self.spec.token_bytes * block_size * len(self.layers)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        """Make the pool [blocks, layers, 2, B, K, H]."""
        spec = self.spec
        heads = (spec.num_kv_heads, spec.head_size)
        shape = (num_blocks, len(self.layers), 2, block_size, *heads)
        self.pool = torch.empty(shape, dtype=spec.dtype, device=device)


def group_layers(specs: Sequence[KVCacheSpec]) -> list[KVGroup]:
    """Layers by equal spec, in order of first appearance."""
    groups: dict[KVCacheSpec, KVGroup] = {}
    for layer, spec in enumerate(specs):
        groups.setdefault(spec, KVGroup(spec, [])).layers.append(layer)
    return list(groups.values())


class ModelRunner:
    """The model, its KV cache and the rows on this rank's device.

    `execute_model` launches a step and does not wait for the device. Ids that it samples
    stay on the device for the next step, and are the same on every rank.
    """

    def __init__(
        self,
        model: CausalLM,
        groups: list[KVGroup],
        inputs: InputBatch,
        vocab_size: int,
        tp: TensorParallelGroup,
        kernel: CpuSampling | None = None,
    ) -> None:
        self.model = model
        self.tp = tp
        self.groups = groups
        self.inputs = inputs
        num_rows = len(inputs.num_prompt_tokens)
        self.sampling = SamplingRows(num_rows, vocab_size, inputs.device, kernel)
        self._kv_caches = _layer_views(groups)
        is_gpu = inputs.device.type == "cuda"
        self._clock = DeviceClock(inputs.device)
        self._copy_stream: torch.cuda.Stream | None = None
        if is_gpu:
            self._copy_stream = torch.cuda.Stream(inputs.device)  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def execute_model(self, decision: SchedulerOutput) -> ModelRunnerOutput:
        """Launch one step. Collective over the tensor group."""
        marks = self._clock.begin()
        self.inputs.apply_changes(decision)
        for row in decision.finished_rows:
            self.sampling.leave(row)
        for new in decision.new_rows:
            self.sampling.enter(new)
        if len(decision.block_copies):
            self._copy_blocks(decision)
        inputs = self.inputs.prepare(decision)
        context = ForwardContext(
            attention=_metadata(inputs, decision.num_decodes), kv_caches=self._kv_caches
        )
        hidden_TD = self.model.forward(inputs.token_ids, inputs.positions, context)
        if len(decision.sampled) == 0:
            marks.end()
            nothing = torch.empty(0, dtype=torch.int64)
            return ModelRunnerOutput(SamplerOutput(nothing), None, marks)
        marks.sampling()
        output = self._sample(hidden_TD, inputs, decision)
        marks.end()
        return ModelRunnerOutput(output, self._copy_stream, marks)

    def _sample(
        self, hidden_TD: Tensor, inputs: StepInputs, decision: SchedulerOutput
    ) -> SamplerOutput:
        sampled = decision.sampled
        if inputs.logits_indices is not None:
            hidden_TD = hidden_TD.index_select(0, inputs.logits_indices)
        if self.sampling.has_wants:
            lengths = (decision.num_computed_tokens + decision.num_scheduled_tokens)[sampled]
            batch = self.sampling.batch(decision.rows[sampled], lengths)
            logits_NV = self.model.compute_logits(hidden_TD)
            output = sample(logits_NV, batch, self.inputs.token_table)
        else:
            output = SamplerOutput(self._likeliest(hidden_TD))
        self.inputs.write_sampled(inputs, output.token_ids)
        return output

    def _likeliest(self, hidden_ND: Tensor) -> Tensor:
        """The likeliest ids, without gathering logits. Collective over the tensor group."""
        if self.tp.size == 1:
            return self.sampling.likeliest(self.model.compute_logits(hidden_ND))
        head = self.model.lm_head
        # The last shards may hold padding rows, which are no ids.
        num_real = min(max(head.vocab_size - head.first_row, 0), head.num_rows)
        logits_NS = head.local_logits(hidden_ND)[:, :num_real]
        return argmax_over_shards(logits_NS, head.first_row, self.tp)

    def _copy_blocks(self, decision: SchedulerOutput) -> None:
        """Make the step's block copies; all sources are read before any is written."""
        for number, group in enumerate(self.groups):
            copies = decision.block_copies[decision.block_copies[:, 0] == number]
            if len(copies):
                assert group.pool is not None
                pairs = to_device(copies[:, 1:].T.astype("int64"), group.pool.device)
                group.pool.index_copy_(0, pairs[1], group.pool.index_select(0, pairs[0]))


def _metadata(inputs: StepInputs, num_decodes: int) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=inputs.query_start_loc,
        seq_lens=inputs.seq_lens,
        block_tables=inputs.block_tables[0],
        slot_mapping=inputs.slot_mappings[0],
        max_query_len=inputs.max_query_len,
        max_seq_len=inputs.max_seq_len,
        num_decodes=num_decodes,
    )


def _layer_views(groups: list[KVGroup]) -> list[Tensor]:
    views: dict[int, Tensor] = {}
    for group in groups:
        assert group.pool is not None
        for place, layer in enumerate(group.layers):
            views[layer] = group.pool[:, place]
    return [views[layer] for layer in sorted(views)]
