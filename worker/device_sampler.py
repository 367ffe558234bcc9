"""Sampling on a GPU: parameters and ids so far stay there, and the host waits for nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from trimaran.comm.collectives import TensorParallelGroup
from trimaran.kernels import triton_logits, triton_mask, triton_sampling
from trimaran.worker.beam_candidates import BeamCandidates, beam_candidates, joined
from trimaran.worker.candidates import LEAST_KEY, id_of_best_key
from trimaran.worker.sampling_rows import SamplingBatch, Want
from trimaran.worker.top_p_resets import with_resets

# Shapes: N sampled rows, V vocabulary, S a rank's shard of it, R rows, L longest sequence.

EDITS = Want.BIAS | Want.PENALTY | Want.NGRAM | Want.BAD_WORDS | Want.MIN_TOKENS | Want.GUIDE
"""What changes logits, which are copied in float32 then: penalties must not be rounded."""

_EDITED_ROWS = 128
"""Rows that are copied at a time: a float32 copy of a large step would take much memory."""


def sample(
    logits_NV: Tensor, batch: SamplingBatch, token_table_RL: Tensor
) -> tuple[Tensor, Tensor | None, BeamCandidates | None]:
    """Ids, int64 [N], and if some row asked the log-probabilities, float32 [N], and beams'.

    The kernels find each row's parameters by its number; the host only launches those that
    some row asks for. ``logits`` have any float dtype and are left as they are.
    """
    parts: list[Tensor] = []
    beams: list[BeamCandidates] = []
    step = _EDITED_ROWS if batch.all_wants & EDITS else len(batch.rows)
    for start in range(0, len(batch.rows), step):
        ids, found = _sample_part(logits_NV, batch, token_table_RL, start, start + step)
        parts.append(ids)
        beams += found
    ids = parts[0] if len(parts) == 1 else torch.cat(parts)
    if batch.all_wants & Want.LOG_PROBS:
        return ids, triton_logits.log_probs(logits_NV, ids), joined(beams)
    return ids, None, joined(beams)


def draw_over_shards(
    logits_NS: Tensor, first_id: int, batch: SamplingBatch, tp: TensorParallelGroup
) -> Tensor:
    """`sample` of rows that want a plain draw at most, without gathering logits; int64 [N].

    ``logits_NS`` are this rank's, for the ids from ``first_id`` on; maybe none. Collective:
    the ranks exchange 8 bytes a row.
    """
    state = batch.state.device_state
    assert state is not None
    assert batch.device_rows is not None
    assert batch.device_lengths is not None
    params = state.tensor()
    if logits_NS.shape[1] == 0:
        keys = torch.full((len(logits_NS),), LEAST_KEY, device=logits_NS.device)
    else:
        keys = triton_sampling.best_keys(
            logits_NS, first_id, batch.device_rows, batch.device_lengths, params
        )
    return id_of_best_key(keys, tp)


def _sample_part(
    logits_NV: Tensor, batch: SamplingBatch, token_table_RL: Tensor, start: int, end: int
) -> tuple[Tensor, list[BeamCandidates]]:
    state = batch.state.device_state
    assert state is not None
    assert batch.device_rows is not None
    assert batch.device_lengths is not None
    part = batch.part(start, end)
    logits = logits_NV[start:end]
    rows, lengths = batch.device_rows[start:end], batch.device_lengths[start:end]
    params = state.tensor()
    if part.all_wants & Want.RESET:
        params = with_resets(params, part, rows, lengths, token_table_RL)
    if part.all_wants & EDITS:
        logits = logits.to(torch.float32, copy=True)
        _edit(logits, part, rows, lengths, token_table_RL)
    beams = [beam_candidates(logits, part)] if part.all_wants & Want.BEAM else []
    has_filters = bool(part.all_wants & Want.FILTER)
    return triton_sampling.draw(logits, rows, lengths, params, has_filters=has_filters), beams


def _edit(
    logits_NV: Tensor, part: SamplingBatch, rows_N: Tensor, lengths_N: Tensor, table_RL: Tensor
) -> None:
    """Apply what the rows ask for, in the order of `sampler.PROCESSORS`."""
    state = part.state.device_state
    assert state is not None
    params, longest = state.tensor(), int(part.lengths.max())
    for entry in part.rows_wanting(Want.BIAS):
        logits_NV[entry] += part.state.biases[int(part.rows[entry])]
    if part.all_wants & Want.PENALTY:
        counts = state.counts(_EDITED_ROWS * logits_NV.shape[1])
        triton_logits.penalise(logits_NV, rows_N, lengths_N, params, table_RL, counts, longest)
    if part.all_wants & (Want.NGRAM | Want.MIN_TOKENS):
        triton_logits.forbid(logits_NV, rows_N, lengths_N, params, table_RL, longest)
    for entry in part.rows_wanting(Want.BAD_WORDS):
        words = state.bad_words[int(part.rows[entry])]
        triton_logits.forbid_bad_words(
            logits_NV, rows_N, lengths_N, table_RL, words, int(entry)
        )
    if part.masks is not None and len(part.masks):
        guided = part.index(part.rows_wanting(Want.GUIDE))
        triton_mask.apply_masks(logits_NV, guided, part.masks)
