"""The results of sampling: ids, log-probabilities, and candidates for beam search."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.worker.sampling.candidates import largest
from trimaran.worker.sampling.sampling_rows import TEMPERATURE, RowFeature, SamplingBatch
from trimaran.worker.steps.staging import to_device
from trimaran.worker.steps.step_types import NO_ID

# Shapes: N sampled rows, V vocabulary, n rows that are beams, K candidates of each.

_ROWS = 32
"""Rows that are ranked at a time: with 128,000 ids each of them takes 3 MB temporarily."""


@dataclass(slots=True)
class BeamCandidates:
    """Each beam's K likeliest next ids, likeliest first; beams in the order of the step."""

    token_ids: Tensor
    """int64 [n, K]."""

    log_probs: Tensor
    """float32 [n, K], after temperature, penalties and masks."""

    def to_host(self) -> BeamCandidates:
        """Launch the copies to the host; on a GPU into pinned memory, without a wait."""
        if self.token_ids.device.type == "cpu":
            return self
        return BeamCandidates(_to_host(self.token_ids), _to_host(self.log_probs))

    def to_lists(self) -> list[tuple[list[int], list[float]]]:
        """Ids and log-probabilities of each beam; the tensors must be on the host."""
        return list(zip(self.token_ids.tolist(), self.log_probs.tolist(), strict=True))


def beam_candidates(logits_NV: Tensor, batch: SamplingBatch) -> BeamCandidates:
    """The candidates of the batch's beams, from fully processed logits."""
    entries = batch.rows_wanting(RowFeature.BEAM)
    starts = range(0, len(entries), _ROWS)
    found = joined(
        [_candidates(logits_NV, batch, entries[start : start + _ROWS]) for start in starts]
    )
    assert found is not None
    return found


def _candidates(
    logits_NV: Tensor, batch: SamplingBatch, entries: npt.NDArray[np.int64]
) -> BeamCandidates:
    rows = batch.rows[entries]
    logits = logits_NV
    if len(entries) < len(batch.rows):
        logits = logits_NV.index_select(0, batch.index(entries))
    temperature = batch.state.float_params[rows, TEMPERATURE, None]
    # Temperature 0 asks for no draw, and must not change logits here.
    temperature = np.where(temperature > 0, temperature, np.float32(1))
    if (temperature != 1).any():
        logits = logits.float() / to_device(temperature, logits_NV.device)
    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    count = min(int(batch.state.num_candidates[rows].max()), logits.shape[1])
    values, ids = largest(log_probs, count)
    return BeamCandidates(ids, values)


def joined(parts: list[BeamCandidates]) -> BeamCandidates | None:
    """The candidates of several parts of a step, in order; None if there are none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    # Parts may hold beams of different widths: pad with masked candidates.
    count = max(part.token_ids.shape[1] for part in parts)
    ids = [_padded(part.token_ids, count, 0) for part in parts]
    log_probs = [_padded(part.log_probs, count, -np.inf) for part in parts]
    return BeamCandidates(torch.cat(ids), torch.cat(log_probs))


def _padded(values_nK: Tensor, count: int, value: float) -> Tensor:
    return torch.nn.functional.pad(values_nK, (0, count - values_nK.shape[1]), value=value)


def _to_host(source: Tensor) -> Tensor:
    memory = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    return memory.copy_(source, non_blocking=True)


@dataclass(slots=True)
class SamplerOutput:
    """Ids [N] int64 on the device; log-probabilities only if some row asked."""

    token_ids: Tensor
    log_probs: Tensor | None = None
    beams: BeamCandidates | None = None
    """Candidates of the beam rows; `token_ids` has no meaning in these rows."""

    is_stuck: Tensor | None = None
    """bool [N]: whether every id is forbidden, which makes the row's id meaningless; None if no
    row forbids ids."""

    def ids_for_host(self) -> Tensor:
        """The ids for the host: `NO_ID` where every id is forbidden."""
        if self.is_stuck is None:
            return self.token_ids
        return self.token_ids.masked_fill(self.is_stuck, NO_ID)
