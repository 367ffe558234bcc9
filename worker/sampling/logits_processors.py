"""Logits processors, each of which changes the rows that ask for it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.worker.config.draft_tree import MAX_NODES
from trimaran.worker.sampling.sampling_rows import (
    END_ID,
    FREQUENCY,
    MIN_TOKENS,
    PRESENCE,
    REPETITION,
    RowFeature,
    SamplingBatch,
)
from trimaran.worker.steps.staging import to_device

# Shapes: N sampled rows, n of them changed, V vocabulary, R rows, L longest sequence.

_NEVER = float("-inf")


def add_bias(logits_NV: Tensor, batch: SamplingBatch, token_table_RL: Tensor) -> None:
    """Add each request's own bias."""
    for entry in batch.rows_wanting(RowFeature.BIAS):
        logits_NV[entry] += batch.state.biases[int(batch.rows[entry])]


def apply_penalties(logits_NV: Tensor, batch: SamplingBatch, token_table_RL: Tensor) -> None:
    """Repetition (prompt and output), presence and frequency penalties (output).

    A seen id's logit is divided by the repetition penalty if positive, else multiplied.
    """
    entries = batch.rows_wanting(RowFeature.PENALTY)
    index, floats = batch.index(entries), batch.floats(entries)
    vocab_size = logits_NV.shape[1]
    tokens, is_known, is_output = _history(batch, entries, token_table_RL)
    counts = torch.zeros((2, len(entries), vocab_size), device=logits_NV.device)
    counts[0].scatter_add_(1, tokens, is_known.float())
    counts[1].scatter_add_(1, tokens, is_output.float())
    logits = logits_NV[index]
    repetition = floats[:, REPETITION, None]
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts[0] > 0, penalised, logits)
    logits -= floats[:, FREQUENCY, None] * counts[1]
    logits -= floats[:, PRESENCE, None] * (counts[1] > 0)
    logits_NV[index] = logits


def _history(
    batch: SamplingBatch,
    entries: npt.NDArray[np.int64],
    token_table_RL: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows' ids so far, padded with 0, which of them are real, and which are output."""
    rows, lengths = batch.rows[entries], batch.lengths[entries].astype(np.int64)
    longest = int(lengths.max())
    host = np.stack((batch.table_rows(entries), lengths, batch.state.num_prompt[rows]))
    device_rows, ends, prompts = to_device(host, token_table_RL.device)
    positions = torch.arange(longest, device=token_table_RL.device)
    is_known = positions < ends[:, None]
    tokens = token_table_RL[:, :longest].index_select(0, device_rows).long()
    # Ids of a prompt table are not in the vocabulary, and are not penalised.
    is_known &= tokens < batch.state.vocab_size
    tokens.masked_fill_(~is_known, 0)
    return tokens, is_known, is_known & (positions >= prompts[:, None])


def forbid_early_end(logits_NV: Tensor, batch: SamplingBatch, token_table_RL: Tensor) -> None:
    """Mask the end ids until there are ``min_tokens`` new tokens."""
    entries = batch.rows_wanting(RowFeature.MIN_TOKENS)
    params = batch.state.int_params[batch.rows[entries]]
    is_early = batch.num_outputs(entries) < params[:, MIN_TOKENS]
    further = batch.state.end_ids
    ends = [
        (entry, end_id)
        for entry, first in zip(entries[is_early], params[is_early, END_ID], strict=True)
        for end_id in (first, *further.get(int(batch.rows[entry]), ()))
        if end_id >= 0
    ]
    if ends:
        indices = batch.index(np.array(ends).T)
        # A tensor: a scalar would be copied to the device with a wait of the host.
        never = logits_NV.new_full((1,), _NEVER)
        logits_NV.index_put_((indices[0], indices[1]), never)


def forbid_bad_words(logits_NV: Tensor, batch: SamplingBatch, token_table_RL: Tensor) -> None:
    """Mask the last id of every bad word whose other ids the sequence ends with."""
    for entry in batch.rows_wanting(RowFeature.BAD_WORDS):
        row, length = int(batch.table_rows(entry)), int(batch.lengths[entry])
        words = batch.state.bad_words[int(batch.rows[entry])]
        end = token_table_RL[row, max(length - words.longest, 0) : length].numpy()
        ids = torch.from_numpy(words.forbidden(end)).long()
        logits_NV[entry].index_fill_(0, ids, _NEVER)


def forbid_repeated_ngrams(
    logits_NV: Tensor, batch: SamplingBatch, token_table_RL: Tensor
) -> None:
    """Mask every id that would complete an n-gram of the sequence a second time."""
    for entry in batch.rows_wanting(RowFeature.NGRAM):
        row, length = int(batch.table_rows(entry)), int(batch.lengths[entry])
        index = batch.state.ngrams[int(batch.rows[entry])]
        if batch.id_rows is not None:
            # The entry before may be on another path.
            index.rewrite(max(0, length - MAX_NODES))
        found = index.forbidden(token_table_RL[row, :length].numpy())
        # Ids of a prompt table are not in the vocabulary.
        ids = torch.from_numpy(found[found < logits_NV.shape[1]]).long()
        logits_NV[entry].index_fill_(0, ids, _NEVER)


def apply_masks(logits_NV: Tensor, batch: SamplingBatch, token_table_RL: Tensor) -> None:
    """Mask the ids that a row's guide does not allow next."""
    assert batch.masks is not None, "a guided row was sampled without its mask"
    index = batch.index(batch.rows_wanting(RowFeature.GUIDE))
    bits = torch.arange(32, dtype=torch.int32, device=logits_NV.device)
    is_allowed = (batch.masks[:, :, None] >> bits & 1).flatten(1)[:, : logits_NV.shape[1]]
    logits_NV[index] = logits_NV[index].masked_fill(is_allowed == 0, _NEVER)
