"""Random sampling: filters, top-p decay, and a Gumbel-max draw from the remaining ids."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.comm.messages.sampling_params import MIN_TEMPERATURE
from trimaran.kernels import sampling_state
from trimaran.worker.sampling.candidates import argmax, largest
from trimaran.worker.sampling.noise import gumbel
from trimaran.worker.sampling.sampling_rows import (
    MIN_P,
    RESET,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TOP_P_DECAY,
    TOP_P_MIN,
    RowFeature,
    SamplingBatch,
)
from trimaran.worker.steps.staging import to_device

# Shapes: N rows of the batch, n of them with a reset id, R rows, L longest sequence.


def decay_steps(batch: SamplingBatch, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """On the CPU: output ids of each row since its reset id came, or since the prompt."""
    steps = batch.num_outputs(entries)
    if batch.token_table is None:
        return steps
    table = batch.token_table.numpy()
    resets = batch.features[entries] & np.uint32(RowFeature.RESET)
    for index in np.flatnonzero(resets):
        row, length = int(batch.rows[entries[index]]), int(batch.lengths[entries[index]])
        ids = table[int(batch.table_rows(entries[index]))]
        output = ids[int(batch.state.num_prompt[row]) : length]
        found = np.flatnonzero(output == batch.state.int_params[row, RESET])
        if len(found):
            steps[index] = len(output) - 1 - found[-1]
    return steps


def with_resets(
    params_RW: Tensor,
    batch: SamplingBatch,
    rows_N: Tensor,
    lengths_N: Tensor,
    token_table_RL: Tensor,
) -> Tensor:
    """On a GPU: the rows' state with the top-p of this step where an id can reset it.

    Launched for steps with such rows alone; the host waits for nothing.
    """
    entries = batch.rows_wanting(RowFeature.RESET)
    index = batch.index(entries)
    rows, lengths = rows_N[index].long(), lengths_N[index][:, None]
    floats, resets = batch.floats(entries), batch.ints(entries)[:, RESET, None]
    longest = int(batch.lengths[entries].max())
    positions = torch.arange(longest, device=params_RW.device)
    prompts = params_RW[rows, sampling_state.NUM_PROMPT][:, None]
    id_rows = rows if batch.id_rows is None else batch.id_rows[index].long()
    tokens = token_table_RL[:, :longest].index_select(0, id_rows)
    is_reset = (tokens == resets) & (positions >= prompts) & (positions < lengths)
    # Where the last reset id is; the prompt's end if there is none.
    starts = torch.where(is_reset, positions + 1, prompts).amax(dim=1, keepdim=True)
    steps = (lengths - starts)[:, 0]
    decayed = floats[:, TOP_P] * floats[:, TOP_P_DECAY] ** steps
    top_p = torch.where(steps > 0, decayed.maximum(floats[:, TOP_P_MIN]), floats[:, TOP_P])
    params = params_RW.clone()
    params[rows, sampling_state.TOP_P] = top_p.float().view(torch.int32)
    params[rows, sampling_state.TOP_P_DECAY] = torch.ones_like(top_p).view(torch.int32)
    return params


# Shapes: N rows that draw, V vocabulary, K candidates of a row.

Entries = npt.NDArray[np.int64]

_FEW = 256
"""Candidates that usually hold the mass of top-p, tried before sorting a vocabulary."""


def draw(logits_NV: Tensor, batch: SamplingBatch, entries: Entries) -> Tensor:
    """Sample the rows ``entries`` of the batch, which these logits belong to. int64 [N].

    Rows without a filter, with top-k, and with other filters take separate paths, so that no
    row is slower for another's filter. The CPU's kernel does the same row by row.
    """
    params = Params(batch, entries)
    kernel = batch.state.kernel
    if kernel is not None:
        filters = np.ascontiguousarray(params.floats[:, (TEMPERATURE, TOP_P, MIN_P)])
        return kernel.draw(logits_NV, filters, params.top_k, params.host_keys())
    has_top_k = (params.top_k > 0) & (params.top_k < logits_NV.shape[1])
    has_other = (params.floats[:, TOP_P] < 1) | (params.floats[:, MIN_P] > 0)
    ways = (
        (has_top_k, _draw_top_k),
        (~has_top_k & has_other, _draw_top_p),
        (~has_top_k & ~has_other, _draw_any),
    )
    ids = None
    for is_here, way in ways:
        rows = np.flatnonzero(is_here)
        if len(rows) == len(entries):
            return way(logits_NV, params)
        if len(rows):
            index = to_device(rows, logits_NV.device)
            ids = index.new_empty(len(entries)) if ids is None else ids
            ids.index_copy_(0, index, way(logits_NV.index_select(0, index), params.of(rows)))
    assert ids is not None
    return ids


class Params:
    """Sampling parameters of rows that draw, on the host, and their copies on the device."""

    def __init__(self, batch: SamplingBatch, entries: Entries) -> None:
        self._batch = batch
        self._entries = entries
        rows = batch.rows[entries]
        self.floats = batch.state.float_params[rows]
        np.maximum(
            self.floats[:, TEMPERATURE], MIN_TEMPERATURE, out=self.floats[:, TEMPERATURE]
        )
        self.top_k = batch.state.int_params[rows, TOP_K]
        decay = self.floats[:, TOP_P_DECAY]
        if (decay != 1).any():
            steps = decay_steps(batch, entries)
            decayed = np.maximum(
                self.floats[:, TOP_P] * decay**steps, self.floats[:, TOP_P_MIN]
            )
            # The minimum applies to rows whose top-p has decayed already, and to no others.
            np.copyto(self.floats[:, TOP_P], decayed, where=(decay != 1) & (steps > 0))

    def of(self, rows: Entries) -> Params:
        """The parameters of some of the rows."""
        return Params(self._batch, self._entries[rows])

    def host_keys(self) -> npt.NDArray[np.int32]:
        """int32 [N, 2]: the noise's keys."""
        return self._batch.keys(self._entries)

    def keys(self, device: torch.device) -> Tensor:
        """The noise's keys on the device."""
        return to_device(self.host_keys(), device)

    def tempered(self, logits_NK: Tensor) -> Tensor:
        """Logits divided by each row's temperature."""
        return logits_NK / to_device(self.floats[:, TEMPERATURE, None], logits_NK.device)


def _draw_any(logits_NV: Tensor, params: Params) -> Tensor:
    ids = torch.arange(logits_NV.shape[1], device=logits_NV.device)[None]
    noise = gumbel(params.keys(logits_NV.device), ids)
    return argmax(noise.add_(params.tempered(logits_NV)))


def _draw_top_k(logits_NV: Tensor, params: Params) -> Tensor:
    """Top-k, then top-p over the mass of what is left, then min-p."""
    count = int(params.top_k.max())
    logits, ids = largest(logits_NV, count)
    values = params.tempered(logits)
    mass = _relative_mass(values)
    is_out = None
    if (params.top_k < count).any():
        top_k = to_device(params.top_k, logits_NV.device)[:, None]
        is_out = torch.arange(count, device=logits_NV.device) >= top_k
        mass.masked_fill_(is_out, 0.0)
    return _draw_from(values, ids, mass, mass.sum(dim=-1, keepdim=True), is_out, params)


def _draw_top_p(logits_NV: Tensor, params: Params) -> Tensor:
    """Top-p and min-p over the whole vocabulary."""
    num_rows, vocab_size = logits_NV.shape
    if logits_NV.device.type != "cpu" or vocab_size < 4 * _FEW:
        return _draw_sorted(logits_NV, params)
    # Looking at the mass makes the host wait, so this is for the CPU alone.
    logits, ids = largest(logits_NV, _FEW)
    values = params.tempered(logits)
    mass = _relative_mass(values)
    whole = params.tempered(logits_NV).logsumexp(dim=-1, keepdim=True)
    total = (whole - values[:, :1]).double().exp_()
    has_mass = mass.sum(dim=-1).numpy() > (params.floats[:, TOP_P] + 1e-5) * total[:, 0].numpy()
    has_tail = mass[:, -1].numpy() < params.floats[:, MIN_P]
    is_enough = has_mass | has_tail
    if is_enough.all():
        return _draw_from(values, ids, mass, total, None, params)
    if not is_enough.any():
        return _draw_sorted(logits_NV, params)
    chosen = torch.empty(num_rows, dtype=torch.int64)
    few, many = np.flatnonzero(is_enough), np.flatnonzero(~is_enough)
    chosen[few] = _draw_from(values[few], ids[few], mass[few], total[few], None, params.of(few))
    chosen[many] = _draw_sorted(logits_NV[many], params.of(many))
    return chosen


def _draw_sorted(logits_NV: Tensor, params: Params) -> Tensor:
    logits, ids = largest(logits_NV, logits_NV.shape[1])
    values = params.tempered(logits)
    mass = _relative_mass(values)
    return _draw_from(values, ids, mass, mass.sum(dim=-1, keepdim=True), None, params)


def _relative_mass(values_NK: Tensor) -> Tensor:
    """Probabilities relative to the likeliest id's, in float64, so that sums are nearly
    exact."""
    return (values_NK - values_NK[:, :1]).double().exp_()


def _draw_from(
    values_NK: Tensor,
    ids_NK: Tensor,
    mass_NK: Tensor,
    total_N1: Tensor,
    is_out_NK: Tensor | None,
    params: Params,
) -> Tensor:
    """Apply top-p of ``total_N1`` and min-p to descending candidates, and draw."""
    is_out_NK = _filtered(mass_NK, total_N1, is_out_NK, params)
    noisy = gumbel(params.keys(values_NK.device), ids_NK).add_(values_NK)
    if is_out_NK is not None:
        noisy.masked_fill_(is_out_NK, float("-inf"))
    return ids_NK.gather(1, noisy.argmax(dim=-1, keepdim=True))[:, 0]


def _filtered(
    mass_NK: Tensor, total_N1: Tensor, is_out_NK: Tensor | None, params: Params
) -> Tensor | None:
    """Which of the descending candidates top-p of ``total_N1`` or min-p excludes, besides
    those that are out already; None for none."""
    device = mass_NK.device
    if (params.floats[:, TOP_P] < 1).any():
        top_p = to_device(params.floats[:, TOP_P].astype(np.float64), device)[:, None]
        is_beyond = mass_NK.cumsum(dim=-1).sub_(mass_NK) >= top_p * total_N1
        # A row without top-p keeps all ids, however its sum was rounded.
        is_beyond &= top_p < 1
        is_out_NK = is_beyond if is_out_NK is None else is_out_NK | is_beyond
    if (params.floats[:, MIN_P] > 0).any():
        min_p = to_device(params.floats[:, MIN_P].astype(np.float64), device)[:, None]
        is_small = mass_NK < min_p
        is_out_NK = is_small if is_out_NK is None else is_out_NK | is_small
    if is_out_NK is not None:
        # The likeliest id stays whatever the parameters are.
        is_out_NK[:, 0] = False
    return is_out_NK


def probabilities(logits_NV: Tensor, params: Params) -> Tensor:
    """float64 [N, V]: the probabilities with which `draw` draws each id."""
    logits, ids = largest(logits_NV, logits_NV.shape[1])
    mass = _relative_mass(params.tempered(logits))
    top_k = np.where(params.top_k > 0, params.top_k, logits_NV.shape[1])
    limits = to_device(top_k, logits_NV.device)[:, None]
    is_out = torch.arange(logits_NV.shape[1], device=logits_NV.device) >= limits
    mass.masked_fill_(is_out, 0.0)
    is_left_out = _filtered(mass, mass.sum(dim=-1, keepdim=True), is_out, params)
    assert is_left_out is not None
    mass.masked_fill_(is_left_out, 0.0)
    mass /= mass.sum(dim=-1, keepdim=True)
    return torch.zeros_like(mass).scatter_(1, ids, mass)
