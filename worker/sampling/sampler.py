"""From logits to the next token ids: row-wise processors, then argmax or a random draw."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from trimaran.worker.sampling import logits_processors
from trimaran.worker.sampling.candidates import is_forbidden
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


def sample(logits_NV: Tensor, batch: SamplingBatch, token_table_RL: Tensor) -> SamplerOutput:
    """Choose each row's next id. A row's result does not depend on the other rows.

    ``logits_NV`` is float32, on a GPU possibly the model's dtype, and may be overwritten.
    ``token_table_RL`` holds every row's ids so far, those sampled by steps in flight included.
    """
    features = batch.all_features
    if features & RowFeature.RESET:
        batch.token_table = token_table_RL
    if batch.device_rows is not None:
        # Imported at the first GPU step, because a CPU has no Triton.
        from trimaran.worker.sampling import device_sampler

        return device_sampler.sample(logits_NV, batch, token_table_RL)
    if not features:
        return SamplerOutput(batch.state.likeliest(logits_NV))
    model_logits = logits_NV.clone() if features & RowFeature.LOG_PROBS else logits_NV
    for feature, process in PROCESSORS:
        if features & feature:
            process(logits_NV, batch, token_table_RL)
    beams = beam_candidates(logits_NV, batch) if features & RowFeature.BEAM else None
    entries = batch.rows_wanting(RowFeature.RANDOM)
    if len(entries) == len(batch.rows):
        ids = draw(logits_NV, batch, entries)
    else:
        ids = batch.state.likeliest(logits_NV)
        if len(entries):
            index = batch.index(entries)
            ids.index_copy_(0, index, draw(logits_NV[index], batch, entries))
    is_stuck = is_forbidden(logits_NV, ids) if features & FORBIDS else None
    if not features & RowFeature.LOG_PROBS:
        return SamplerOutput(ids, None, beams, is_stuck)
    chosen = model_logits.gather(1, ids[:, None])[:, 0]
    return SamplerOutput(ids, chosen - model_logits.logsumexp(dim=-1), beams, is_stuck)
