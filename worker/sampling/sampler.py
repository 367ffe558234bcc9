"""From logits to the next token ids: row-wise processors, then argmax or a random draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from trimaran.comm.collectives.tensor_group import TensorParallelGroup
from trimaran.worker.sampling import logits_processors
from trimaran.worker.sampling.candidates import argmax_over_shards, is_forbidden
from trimaran.worker.sampling.draft_acceptance import DraftAcceptance
from trimaran.worker.sampling.draw import draw
from trimaran.worker.sampling.outputs import SamplerOutput, beam_candidates
from trimaran.worker.sampling.sampling_rows import FORBIDS, RowFeature, SamplingBatch

# Shapes: N sampled rows, V vocabulary, R rows, L longest sequence.

Processor = Callable[[Tensor, SamplingBatch, Tensor], None]

PROCESSORS: tuple[tuple[RowFeature, Processor], ...] = (
    (RowFeature.BIAS, logits_processors.add_bias),
    (RowFeature.PENALTY, logits_processors.apply_penalties),
    (RowFeature.NGRAM, logits_processors.forbid_repeated_ngrams),
    (RowFeature.BAD_WORDS, logits_processors.forbid_bad_words),
    (RowFeature.MIN_TOKENS, logits_processors.forbid_early_end),
    (RowFeature.GUIDE, logits_processors.apply_masks),
)
"""In order of application; each changes only the rows that ask for it."""


class Sampler(Protocol):
    """Chooses each row's next id. A row's result does not depend on the other rows."""

    def takes_shards(self, batch: SamplingBatch) -> bool:
        """Whether `sample_shards` serves the batch, so that no rank gathers all logits."""
        ...

    def sample(
        self, logits_NV: Tensor, batch: SamplingBatch, token_table_RL: Tensor
    ) -> SamplerOutput:
        """Choose from whole logits: float32, on a GPU possibly the model's dtype.

        The logits may be overwritten. ``token_table_RL`` holds every row's ids so far, those
        sampled by steps in flight included.
        """
        ...

    def sample_shards(
        self, logits_NS: Tensor, first_id: int, batch: SamplingBatch, token_table_RL: Tensor
    ) -> SamplerOutput:
        """Choose from this rank's logits, which start at id ``first_id`` and may end with
        padding. Collective over the tensor group."""
        ...


def make_sampler(device: torch.device, tp: TensorParallelGroup) -> Sampler:
    """The sampler for a device."""
    if device.type == "cuda":
        # Imported late, because a CPU needs no Triton.
        from trimaran.worker.sampling.device_sampler import DeviceSampler

        return DeviceSampler(tp)
    return HostSampler(tp)


class HostSampler:
    """The sampler of a CPU. Parameters and ids so far are on the host."""

    def __init__(self, tp: TensorParallelGroup) -> None:
        self._tp = tp

    def takes_shards(self, batch: SamplingBatch) -> bool:
        """Only if every row takes its likeliest id."""
        return not batch.all_features and not batch.draft_rules

    def sample(
        self, logits_NV: Tensor, batch: SamplingBatch, token_table_RL: Tensor
    ) -> SamplerOutput:
        """Choose from whole float32 logits."""
        features = batch.all_features
        if features & RowFeature.RESET:
            batch.token_table = token_table_RL
        drafted = None
        if batch.draft_rules:
            drafted = DraftAcceptance(logits_NV, batch, batch.draft_rules)
        elif not features:
            return SamplerOutput(batch.state.likeliest(logits_NV))
        model_logits = logits_NV.clone() if features & RowFeature.LOG_PROBS else logits_NV
        _edit(logits_NV, batch, token_table_RL)
        beams = beam_candidates(logits_NV, batch) if features & RowFeature.BEAM else None
        ids = _draw(logits_NV, batch)
        is_stuck = is_forbidden(logits_NV, ids) if features & FORBIDS else None
        if drafted is not None:
            drafted.replace(ids, _edit, token_table_RL)
        if not features & RowFeature.LOG_PROBS:
            return SamplerOutput(ids, None, beams, is_stuck)
        chosen = model_logits.gather(1, ids[:, None])[:, 0]
        return SamplerOutput(ids, chosen - model_logits.logsumexp(dim=-1), beams, is_stuck)

    def sample_shards(
        self, logits_NS: Tensor, first_id: int, batch: SamplingBatch, token_table_RL: Tensor
    ) -> SamplerOutput:
        """The likeliest ids, without gathering logits. Collective."""
        num_real = min(max(batch.state.vocab_size - first_id, 0), logits_NS.shape[1])
        return SamplerOutput(argmax_over_shards(logits_NS[:, :num_real], first_id, self._tp))


def _edit(logits_NV: Tensor, batch: SamplingBatch, token_table_RL: Tensor) -> None:
    for feature, process in PROCESSORS:
        if batch.all_features & feature:
            process(logits_NV, batch, token_table_RL)


def _draw(logits_NV: Tensor, batch: SamplingBatch) -> Tensor:
    """A random id for rows that ask for it, the likeliest id for others; int64 [N]."""
    entries = batch.rows_wanting(RowFeature.RANDOM)
    if len(entries) == len(batch.rows):
        return draw(logits_NV, batch, entries)
    ids = batch.state.likeliest(logits_NV)
    if len(entries):
        index = batch.index(entries)
        ids.index_copy_(0, index, draw(logits_NV[index], batch, entries))
    return ids
