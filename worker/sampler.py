"""From logits to the next token ids: row-wise processors, then the likeliest or a draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.comm.collectives import TensorParallelGroup
from trimaran.worker import logits_processors
from trimaran.worker.noise import gumbel
from trimaran.worker.sampling_rows import (
    MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SamplingBatch,
    Want,
)

# Shapes: N sampled rows, V vocabulary, K candidates of a row.

Processor = Callable[[Tensor, SamplingBatch, Tensor], None]

PROCESSORS: tuple[tuple[Want, Processor], ...] = (
    (Want.BIAS, logits_processors.add_bias),
    (Want.PENALTY, logits_processors.apply_penalties),
    (Want.NGRAM, logits_processors.forbid_repeated_ngrams),
    (Want.BAD_WORDS, logits_processors.forbid_bad_words),
    (Want.MIN_TOKENS, logits_processors.forbid_early_end),
)
"""In order of application; each touches only the rows that ask for it."""

_MIN_TEMPERATURE = 1e-5
_FEW = 256
"""Candidates that usually hold the mass of top-p, tried before sorting a vocabulary."""


@dataclass(slots=True)
class SamplerOutput:
    """Ids [N] int64 on the device; log-probabilities only if some row asked."""

    token_ids: Tensor
    log_probs: Tensor | None = None


def sample(logits_NV: Tensor, batch: SamplingBatch, token_table_RL: Tensor) -> SamplerOutput:
    """Choose each row's next id. A row's result does not depend on the other rows.

    ``logits_NV`` is float32 and may be overwritten. ``token_table_RL`` holds every row's
    ids so far, those sampled by steps in flight included.
    """
    wants = batch.all_wants
    if not wants:
        return SamplerOutput(argmax(logits_NV))
    model_logits = logits_NV.clone() if wants & Want.LOG_PROBS else logits_NV
    for want, process in PROCESSORS:
        if wants & want:
            process(logits_NV, batch, token_table_RL)
    entries = batch.rows_wanting(Want.RANDOM)
    if len(entries) == len(batch.rows):
        ids = _draw(logits_NV, batch, entries)
    else:
        ids = argmax(logits_NV)
        if len(entries):
            index = batch.index(entries)
            ids.index_copy_(0, index, _draw(logits_NV[index], batch, entries))
    if not wants & Want.LOG_PROBS:
        return SamplerOutput(ids)
    chosen = model_logits.gather(1, ids[:, None])[:, 0]
    return SamplerOutput(ids, chosen - model_logits.logsumexp(dim=-1))


def argmax_over_shards(logits_NS: Tensor, first_id: int, tp: TensorParallelGroup) -> Tensor:
    """`argmax` of logits whose vocabulary is cut over the ranks; the same on every rank.

    ``logits_NS`` are this rank's, for the ids from ``first_id`` on; maybe none. Collective:
    the ranks exchange 8 bytes a row, which order like (value, inverted id).
    """
    if logits_NS.shape[1] == 0:
        best = torch.full((len(logits_NS), 1), -(1 << 63), device=logits_NS.device)
    else:
        ids = argmax(logits_NS)[:, None]
        best = _sort_keys(logits_NS.gather(1, ids), ids + first_id)
    return _ID_BITS - (tp.all_gather(best, 1).amax(dim=1) & _ID_BITS)


def argmax(logits_NV: Tensor) -> Tensor:
    """The first of the likeliest ids of each row, int64 [N]."""
    if logits_NV.device.type == "cpu":
        # numpy's is vectorised: about ten times as fast as torch's on this data.
        return torch.from_numpy(np.asarray(logits_NV.numpy().argmax(axis=-1)))
    return logits_NV.argmax(dim=-1)


def _draw(logits_NV: Tensor, batch: SamplingBatch, entries: npt.NDArray[np.int64]) -> Tensor:
    """Sample the rows ``entries``, whose logits these are."""
    floats, ints, keys = batch.floats(entries), batch.ints(entries), batch.keys(entries)
    host_floats = batch.state.float_params[batch.rows[entries]]
    top_k = batch.state.int_params[batch.rows[entries], TOP_K]
    scaled = logits_NV / floats[:, TEMPERATURE, None].clamp(min=_MIN_TEMPERATURE)
    vocab_size = scaled.shape[1]
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    has_filter = has_top_k | (host_floats[:, TOP_P] < 1) | (host_floats[:, MIN_P] > 0)
    if not has_filter.any():
        ids = torch.arange(vocab_size, device=scaled.device)[None]
        return argmax(scaled.add_(gumbel(keys, ids)))
    if has_top_k.all():
        return _draw_candidates(scaled, floats, ints, keys, int(top_k.max()), needs_whole=False)
    if (
        scaled.device.type == "cpu"
        and has_filter.all()
        and not (host_floats[:, MIN_P] > 0).any()
    ):
        # The host may look at the result, which it must not do on a GPU.
        limit = min(vocab_size, max(_FEW, int(top_k[has_top_k].max(initial=0))))
        if _holds_mass(scaled, floats, limit):
            return _draw_candidates(scaled, floats, ints, keys, limit, needs_whole=True)
    return _draw_candidates(scaled, floats, ints, keys, vocab_size, needs_whole=False)


def _holds_mass(scaled_NV: Tensor, floats: Tensor, count: int) -> bool:
    """Whether each row's ``count`` likeliest ids surely hold the mass of its top-p."""
    total = scaled_NV.logsumexp(dim=-1)
    largest = scaled_NV.topk(count, dim=-1).values
    mass = (largest.double() - total.double()[:, None]).exp_().sum(dim=-1)
    return bool((mass > floats[:, TOP_P].double() + 1e-6).all())


def _draw_candidates(
    scaled_NV: Tensor,
    floats: Tensor,
    ints: Tensor,
    keys: Tensor,
    count: int,
    *,
    needs_whole: bool,
) -> Tensor:
    """Filter each row's ``count`` likeliest ids by top-k, then top-p and min-p, and draw.

    ``needs_whole``: some row has no top-k, and more mass than its candidates'.
    """
    values, ids = _largest(scaled_NV, count)
    top_k = ints[:, TOP_K, None]
    places = torch.arange(count, device=values.device)
    is_out = (places >= top_k) & (top_k > 0)
    # Relative to the likeliest id; in float64 the sums do not depend on how they are cut.
    mass = (values - values[:, :1]).double().exp_().masked_fill_(is_out, 0.0)
    total = mass.sum(dim=-1, keepdim=True)
    if needs_whole:
        whole = (scaled_NV - values[:, :1]).double().exp_().sum(dim=-1, keepdim=True)
        total = torch.where(top_k > 0, total, whole)
    before = mass.cumsum(dim=-1) - mass
    is_out |= before >= floats[:, TOP_P, None].double() * total
    is_out |= mass < floats[:, MIN_P, None].double()
    # The likeliest stays whatever the parameters are.
    is_out[:, 0] = False
    noisy = (values + gumbel(keys, ids)).masked_fill_(is_out, float("-inf"))
    return ids.gather(1, noisy.argmax(dim=-1, keepdim=True))[:, 0]


def _largest(scaled_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each row's ``count`` largest values and their ids, descending; of equals the lower id.

    So every device and every ``count`` gives the same order.
    """
    is_cpu = scaled_NV.device.type == "cpu"
    if is_cpu and count < scaled_NV.shape[1]:
        values, ids = scaled_NV.topk(count + 1, dim=-1)
        # Which of equals a plain topk drops is not defined, so none may be at the edge.
        if not (values[:, -1] == values[:, -2]).any():
            sort_keys = _sort_keys(values[:, :-1], ids[:, :-1])
            return _by_keys(scaled_NV, _sorted_on_host(sort_keys))
    sort_keys = _sort_keys(scaled_NV, torch.arange(scaled_NV.shape[1], device=scaled_NV.device))
    if is_cpu:
        return _by_keys(scaled_NV, _sorted_on_host(sort_keys)[:, :count])
    if count < scaled_NV.shape[1]:
        return _by_keys(scaled_NV, sort_keys.topk(count, dim=-1).values)
    return _by_keys(scaled_NV, sort_keys.sort(dim=-1, descending=True).values)


_ID_BITS = 0x7FFFFFFF


def _sort_keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64 that order like (value, inverted id); all of a row are different."""
    bits = values.contiguous().view(torch.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return order.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(_ID_BITS - ids)


def _by_keys(scaled_NV: Tensor, sort_keys: Tensor) -> tuple[Tensor, Tensor]:
    ids = _ID_BITS - (sort_keys & _ID_BITS)
    return scaled_NV.gather(1, ids), ids


def _sorted_on_host(sort_keys: Tensor) -> Tensor:
    """Descending rows, by numpy: its vectorised sort is many times as fast as torch's."""
    inverted = np.invert(sort_keys.numpy())
    inverted.sort(axis=-1)
    return torch.from_numpy(np.invert(inverted, out=inverted))
