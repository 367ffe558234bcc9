"""The likeliest ids of each row, in an order that is the same on every device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trimaran.comm.collectives.tensor_group import TensorParallelGroup

# Shapes: N rows, V vocabulary.

_ID_BITS = 0x7FFFFFFF

MIN_KEY = -(1 << 63)
"""The key of a rank without ids."""


def argmax(logits_NV: Tensor) -> Tensor:
    """The first of the ids of highest logit in each row, int64 [N]."""
    if logits_NV.device.type == "cpu":
        # numpy's is vectorised: about ten times as fast as torch's on this data.
        return torch.from_numpy(np.asarray(logits_NV.numpy().argmax(axis=-1)))
    return logits_NV.argmax(dim=-1)


def is_forbidden(logits_NV: Tensor, ids_N: Tensor) -> Tensor:
    """Whether the chosen id of each row is forbidden, bool [N]; then every id is."""
    return logits_NV.gather(1, ids_N[:, None])[:, 0] == float("-inf")


def argmax_over_shards(logits_NS: Tensor, first_id: int, tp: TensorParallelGroup) -> Tensor:
    """`argmax` of logits whose vocabulary is sharded over the ranks; the same on every rank.

    ``logits_NS`` are this rank's, starting at id ``first_id``; possibly empty. Collective: the
    ranks exchange 8 bytes a row, which order like (value, inverted id).
    """
    if logits_NS.shape[1] == 0:
        best = torch.full((len(logits_NS), 1), MIN_KEY, device=logits_NS.device)
    else:
        ids = argmax(logits_NS)[:, None]
        best = _sort_keys(logits_NS.gather(1, ids).float(), ids + first_id)
    return id_of_best_key(best[:, 0], tp)


def id_of_best_key(keys_N: Tensor, tp: TensorParallelGroup) -> Tensor:
    """The ids in the largest of all ranks' keys, int64 [N]; see `_sort_keys`. Collective."""
    every = tp.all_gather(keys_N, 0).view(tp.size, -1)
    return _ID_BITS - (every.amax(dim=0) & _ID_BITS)


def largest(scaled_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each row's ``count`` largest values and their ids, descending; ties by the lower id.

    The order is the same on every device and for every ``count``.
    """
    vocab_size = scaled_NV.shape[1]
    if scaled_NV.device.type == "cpu":
        has_few = 4 * count <= vocab_size
        sort_keys = _keys_of_largest(scaled_NV, count) if has_few else _all_keys(scaled_NV)
        return _by_keys(scaled_NV, _sorted_on_host(sort_keys)[:, :count])
    if count < vocab_size:
        return _by_keys(scaled_NV, _all_keys(scaled_NV).topk(count, dim=-1).values)
    return _by_keys(scaled_NV, _all_keys(scaled_NV).sort(dim=-1, descending=True).values)


def _keys_of_largest(scaled_NV: Tensor, count: int) -> Tensor:
    """Sort keys of at least each row's ``count`` largest, padded with the least; on the CPU.

    The ids are divided into groups. For ``count`` groups the largest value is at least the
    ``count``-th largest such value, so no id below that is among the row's ``count`` largest.
    """
    values = scaled_NV.numpy()
    num_rows, vocab_size = values.shape
    depth = min(32, vocab_size // (2 * count))
    num_groups = vocab_size // depth
    grouped = values[:, : depth * num_groups].reshape(num_rows, depth, num_groups)
    largest = grouped.max(axis=1)
    rank = num_groups - count
    bounds = np.partition(largest, rank, axis=1)[:, rank]
    # Not `>=`: a row with NaN must keep its ids too.
    is_below = values < bounds[:, None]
    rows, ids = np.divmod(np.flatnonzero(np.invert(is_below, out=is_below)), vocab_size)
    counts = np.bincount(rows, minlength=num_rows)
    columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    keys = np.full((num_rows, int(counts.max())), np.iinfo(np.int64).min)
    found = _sort_keys(torch.from_numpy(values[rows, ids]), torch.from_numpy(ids))
    keys[rows, columns] = found.numpy()
    return torch.from_numpy(keys)


def _all_keys(scaled_NV: Tensor) -> Tensor:
    return _sort_keys(scaled_NV, torch.arange(scaled_NV.shape[1], device=scaled_NV.device))


def _sort_keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64 that order like (value, inverted id); all keys of a row are different."""
    bits = values.contiguous().view(torch.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return order.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(_ID_BITS - ids)


def _by_keys(scaled_NV: Tensor, sort_keys: Tensor) -> tuple[Tensor, Tensor]:
    ids = _ID_BITS - (sort_keys & _ID_BITS)
    return scaled_NV.gather(1, ids), ids


def _sorted_on_host(sort_keys: Tensor) -> Tensor:
    """Descending rows, by numpy, whose vectorised sort is many times as fast as torch's."""
    inverted = np.invert(sort_keys.numpy())
    inverted.sort(axis=-1)
    return torch.from_numpy(np.invert(inverted, out=inverted))
