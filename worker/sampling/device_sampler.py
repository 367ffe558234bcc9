"""Sampling on a GPU: parameters and ids so far stay on the device; the host never waits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.comm.collectives.tensor_group import TensorParallelGroup
from trimaran.kernels.triton import logits as triton_logits
from trimaran.kernels.triton import sampling as triton_sampling
from trimaran.worker.sampling.candidates import MIN_KEY, id_of_best_key, is_forbidden
from trimaran.worker.sampling.draft_acceptance import DraftAcceptance
from trimaran.worker.sampling.draw import with_resets
from trimaran.worker.sampling.outputs import (
    BeamCandidates,
    SamplerOutput,
    beam_candidates,
    joined,
)
from trimaran.worker.sampling.sampling_rows import FORBIDS, RowFeature, SamplingBatch

# Shapes: N sampled rows, V vocabulary, S a rank's shard of it, R rows, L longest sequence.

EDITS = (
    RowFeature.BIAS
    | RowFeature.PENALTY
    | RowFeature.NGRAM
    | RowFeature.BAD_WORDS
    | RowFeature.MIN_TOKENS
    | RowFeature.GUIDE
)
"""Processors that change logits. Such rows get a float32 copy, so that penalties are not
rounded."""

_EDITED_ROWS = 128
"""Rows that are copied at a time: a float32 copy of a large step would take much memory."""


class DeviceSampler:
    """The sampler of a GPU.

    The kernels find each row's parameters by its number; the host launches only the processors
    that some row asks for. Logits have any float dtype and stay unchanged: rows with changed
    logits are sampled from copies. One launch serves the other rows, which are no slower.
    """

    def __init__(self, tp: TensorParallelGroup) -> None:
        self._tp = tp

    def takes_shards(self, batch: SamplingBatch) -> bool:
        """If most rows need a plain draw or the likeliest id alone."""
        return batch.is_mostly_plain

    def sample(
        self, logits_NV: Tensor, batch: SamplingBatch, token_table_RL: Tensor
    ) -> SamplerOutput:
        """Choose each row's next id from whole logits."""
        params = _params(batch, token_table_RL)
        drafted = None
        if batch.draft_rules:
            drafted = DraftAcceptance(logits_NV, batch, batch.draft_rules)
        entries = _edited(batch)
        if len(entries):
            output = _sample_edited(logits_NV, batch, token_table_RL, entries, params)
        else:
            ids, beams = _draw(logits_NV, batch, params), _beams(logits_NV, batch)
            output = SamplerOutput(ids, None, joined(beams))
        if drafted is not None:
            drafted.replace(output.token_ids, _edit_drafted, token_table_RL)
        if batch.all_features & RowFeature.LOG_PROBS:
            output.log_probs = triton_logits.log_probs(logits_NV, output.token_ids)
        return output

    def sample_shards(
        self, logits_NS: Tensor, first_id: int, batch: SamplingBatch, token_table_RL: Tensor
    ) -> SamplerOutput:
        """`sample` that gathers logits of rows with more than a plain draw alone. Collective.

        For a plain row the ranks exchange 8 bytes, and its log-probability is 0.
        """
        num_real = min(max(batch.state.vocab_size - first_id, 0), logits_NS.shape[1])
        mine_NS = logits_NS[:, :num_real]
        entries = batch.beyond_plain()
        if not len(entries):
            return SamplerOutput(_draw_over_shards(mine_NS, first_id, batch, self._tp))
        index = batch.index(entries)
        whole_nV = self._tp.all_gather(logits_NS.index_select(0, index), -1)
        whole_nV = whole_nV[:, : batch.state.vocab_size]
        found = self.sample(whole_nV, batch.at(entries, index), token_table_RL)
        plain = batch.without(entries, index)
        ids = _draw_over_shards(mine_NS, first_id, plain, self._tp)
        count = len(batch.rows)
        return SamplerOutput(
            ids.index_copy_(0, index, found.token_ids),
            _spread(found.log_probs, index, count),
            found.beams,
            _spread(found.is_stuck, index, count),
        )


def _spread(values_n: Tensor | None, index_n: Tensor, count: int) -> Tensor | None:
    """[``count``]: the values at these indices, 0 elsewhere; None for None."""
    if values_n is None or len(values_n) == count:
        return values_n
    return values_n.new_zeros(count).index_copy_(0, index_n, values_n)


def _draw_over_shards(
    logits_NS: Tensor, first_id: int, batch: SamplingBatch, tp: TensorParallelGroup
) -> Tensor:
    """Plain draws and likeliest ids, int64 [N], from a rank's logits, which may be empty."""
    state = batch.state.device_state
    assert state is not None
    assert batch.device_rows is not None
    assert batch.device_lengths is not None
    params = state.tensor()
    if logits_NS.shape[1] == 0:
        keys = torch.full((len(logits_NS),), MIN_KEY, device=logits_NS.device)
    else:
        keys = triton_sampling.best_keys(
            logits_NS, first_id, batch.device_rows, batch.device_lengths, params
        )
    return id_of_best_key(keys, tp)


def _params(batch: SamplingBatch, token_table_RL: Tensor) -> Tensor:
    """Every row's state, with the top-p of this step."""
    state = batch.state.device_state
    assert state is not None
    params = state.tensor()
    if not batch.all_features & RowFeature.RESET:
        return params
    assert batch.device_rows is not None
    assert batch.device_lengths is not None
    return with_resets(params, batch, batch.device_rows, batch.device_lengths, token_table_RL)


def _edited(batch: SamplingBatch) -> npt.NDArray[np.int64]:
    """Entries that are sampled from copies; with them all beams, so that beams stay in
    order."""
    if not batch.all_features & EDITS:
        return np.empty(0, dtype=np.int64)
    return batch.rows_wanting(EDITS | RowFeature.BEAM)


def _sample_edited(
    logits_NV: Tensor,
    batch: SamplingBatch,
    token_table_RL: Tensor,
    entries: npt.NDArray[np.int64],
    params_RW: Tensor,
) -> SamplerOutput:
    """Ids and beams of a batch, of which ``entries`` are sampled from copies."""
    count = len(entries)
    guided = np.flatnonzero(batch.features[entries] & np.uint32(RowFeature.GUIDE))
    # One copy to the device for both: each would delay the device between two kernels.
    sent = batch.index(np.concatenate((entries, guided % _EDITED_ROWS)))
    index, masked = sent[:count], sent[count:]
    if count < len(batch.rows):
        ids = _draw(logits_NV, batch.without(entries, index), params_RW)
    else:
        ids = torch.empty(count, dtype=torch.int64, device=logits_NV.device)
    beams: list[BeamCandidates] = []
    stuck: list[Tensor] = []
    for start in range(0, count, _EDITED_ROWS):
        end = start + _EDITED_ROWS
        part = batch.at(entries[start:end], index[start:end])
        logits = logits_NV.index_select(0, index[start:end]).float()
        first, last = np.searchsorted(guided, (start, end))
        _edit(logits, part, token_table_RL, masked[first:last])
        beams += _beams(logits, part)
        found = _draw(logits, part, params_RW)
        ids.index_copy_(0, index[start:end], found)
        if batch.all_features & FORBIDS:
            stuck.append(is_forbidden(logits, found))
    is_stuck = None
    if stuck:
        is_stuck = stuck[0] if len(stuck) == 1 else torch.cat(stuck)
    return SamplerOutput(ids, None, joined(beams), _spread(is_stuck, index, len(batch.rows)))


def _edit_drafted(logits_NV: Tensor, batch: SamplingBatch, token_table_RL: Tensor) -> None:
    """Apply the processors in parts, for which there is memory."""
    for start in range(0, len(batch.rows), _EDITED_ROWS):
        rows = np.arange(start, min(start + _EDITED_ROWS, len(batch.rows)))
        part = batch.copy_of(rows)
        guided = batch.index(part.rows_wanting(RowFeature.GUIDE))
        # The slice is a view: the processors work in place.
        _edit(logits_NV[start : start + len(rows)], part, token_table_RL, guided)


def _draw(logits_NV: Tensor, batch: SamplingBatch, params_RW: Tensor) -> Tensor:
    assert batch.device_rows is not None
    assert batch.device_lengths is not None
    has_filters = bool(batch.all_features & RowFeature.FILTER)
    return triton_sampling.draw(
        logits_NV, batch.device_rows, batch.device_lengths, params_RW, has_filters=has_filters
    )


def _beams(logits_NV: Tensor, batch: SamplingBatch) -> list[BeamCandidates]:
    return [beam_candidates(logits_NV, batch)] if batch.all_features & RowFeature.BEAM else []


def _edit(logits_NV: Tensor, part: SamplingBatch, table_RL: Tensor, masked_M: Tensor) -> None:
    """Apply the rows' processors, in the order of `sampler.PROCESSORS`.

    ``masked`` is int64, on the device: the entries with guides.
    """
    state, rows_N, lengths_N = part.state.device_state, part.device_rows, part.device_lengths
    assert state is not None
    assert rows_N is not None
    assert lengths_N is not None
    ids_N = part.id_rows
    params, longest = state.tensor(), int(part.lengths.max())
    for entry in part.rows_wanting(RowFeature.BIAS):
        logits_NV[entry] += part.state.biases[int(part.rows[entry])]
    if part.all_features & RowFeature.PENALTY:
        counts = state.counts(_EDITED_ROWS * logits_NV.shape[1])
        triton_logits.penalise(
            logits_NV, rows_N, lengths_N, params, table_RL, counts, longest, ids_N
        )
    if part.all_features & (RowFeature.NGRAM | RowFeature.MIN_TOKENS):
        triton_logits.forbid(logits_NV, rows_N, lengths_N, params, table_RL, longest, ids_N)
    for entry in part.rows_wanting(RowFeature.BAD_WORDS):
        words = state.bad_words[int(part.rows[entry])]
        triton_logits.forbid_bad_words(
            logits_NV, rows_N if ids_N is None else ids_N, lengths_N, table_RL,
            words.last, words.starts, words.before, int(entry),
        )  # fmt: skip
    if part.masks is not None and len(masked_M):
        triton_logits.apply_masks(logits_NV, masked_M, part.masks)
