"""From logits to ids on a GPU: greedy or a draw, from all ids or with a row's filters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels import sampling_state
from trimaran.kernels.triton import filters as triton_filters
from trimaran.kernels.triton import gumbel as triton_gumbel
from trimaran.kernels.triton.launch import Launcher, num_tiles, padded_size

# Shapes: N sampled rows, V vocabulary, S a rank's shard of it, R rows, P parts of it,
# L longest sequence, T ring slots of steps in flight.

_WIDTH = tl.constexpr(sampling_state.WIDTH)
_TOP_K = tl.constexpr(sampling_state.TOP_K)
_TEMPERATURE = tl.constexpr(sampling_state.TEMPERATURE)

_TILE = 2048
"""Ids that one program processes at once."""

_PROGRAMS = 132 * 16
"""Twice the programs that the largest GPU runs at once. Few rows are split into about this
many parts, so that a slow part, or an exact one, delays the others little.
"""

_IDS = 256
"""Ids that one program stores."""

_MAX_TILES = 6
"""Tiles of a part if there are more programs than that. On an H200 64 rows of 128,256 take
17 us, instead of 22 with parts of 7; 256 rows take 41, instead of 44 with parts of 8.
"""


@triton.jit(do_not_specialize=["num_parts", "tiles_each", "has_filters"])  # type: ignore[untyped-decorator,unused-ignore]
def _gumbel_kernel(  # type: ignore[no-untyped-def]
    logits, rows, lengths, state, scores, winners, row_stride, vocab_size, num_tiles, num_parts,
    tiles_each, has_filters, TILE: tl.constexpr, FIRST_ID: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The index of the best score in one part of one row, and the score."""
    entry, part = tl.program_id(0), tl.program_id(1)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(rows + entry)
    own = state + tl.maximum(row, 0).to(tl.int64) * _WIDTH
    temperature = triton_gumbel.load_float(own + _TEMPERATURE)
    first = part * tiles_each
    last = tl.minimum(first + tiles_each, num_tiles)
    source = logits + entry.to(tl.int64) * row_stride
    # Rows that draw with top-k do so from a short list instead.
    top_k = tl.load(own + _TOP_K)
    is_listed = (temperature > 0.0) & (top_k > 0) & (top_k < vocab_size)
    if (row < 0) | ((has_filters > 0) & is_listed):
        score, winner = float("-inf"), 0
    elif temperature > 0.0:
        length = tl.load(lengths + entry)
        first_key, second_key = triton_gumbel.noise_keys(own, length)
        score, winner = triton_gumbel.gumbel_argmax(
            source, vocab_size, first, last, temperature, first_key, second_key, 0.0, 0, False,
            TILE, FIRST_ID,
        )  # fmt: skip
    else:
        score, winner = triton_gumbel.likeliest(source, vocab_size, first, last, TILE)
    tl.store(scores + entry * num_parts + part, score)
    tl.store(winners + entry * num_parts + part, winner)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _best_part(  # type: ignore[no-untyped-def]
    scores, winners, entry, num_parts, vocab_size, PADDED: tl.constexpr
):
    """The best score of a row's parts, and its id; on equal scores the first part's."""
    parts = tl.arange(0, PADDED)
    is_part = parts < num_parts
    score = tl.load(scores + entry * num_parts + parts, mask=is_part, other=float("-inf"))
    winner = tl.load(winners + entry * num_parts + parts, mask=is_part, other=0x7FFFFFFF)
    top = tl.max(score, 0)
    best = tl.min(tl.where(score == top, winner, 0x7FFFFFFF), 0)
    # NaN logits must not produce an id outside of the vocabulary.
    return top, tl.minimum(best, vocab_size - 1)


@triton.jit(do_not_specialize=["num_parts", "first_id"])  # type: ignore[untyped-decorator,unused-ignore]
def _finish_kernel(  # type: ignore[no-untyped-def]
    scores, winners, output, num_parts, vocab_size, first_id, IS_SHARD: tl.constexpr,
    PADDED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The best of a row's parts. Shards return the key of the best score."""
    entry = tl.program_id(0)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    top, best = _best_part(scores, winners, entry, num_parts, vocab_size, PADDED)
    if IS_SHARD:
        # Both zeros compare equal.
        bits = (top + 0.0).to(tl.int32, bitcast=True)
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        tl.store(output + entry, (order << 32) | (0x7FFFFFFF - (best + first_id)).to(tl.int64))
    else:
        tl.store(output + entry, best.to(tl.int64))


@triton.jit(do_not_specialize=["num_parts", "row_width"])  # type: ignore[untyped-decorator,unused-ignore]
def _finish_and_store_kernel(  # type: ignore[no-untyped-def]
    scores, winners, indices, table, output_ids, ring_slot, num_parts, vocab_size, row_width,
    PADDED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the best id of a row's parts to the token table and to the ids for the host."""
    entry = tl.program_id(0)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    _, best = _best_part(scores, winners, entry, num_parts, vocab_size, PADDED)
    tl.store(output_ids + tl.load(ring_slot) * row_width + entry, best)
    tl.store(table + tl.load(indices + entry), best)


@triton.jit(do_not_specialize=["count", "row_width"])  # type: ignore[untyped-decorator,unused-ignore]
def _store_ids_kernel(  # type: ignore[no-untyped-def]
    ids, indices, table, output_ids, ring_slot, count, row_width, TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write ids to the token table and to the ids for the host."""
    entries = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    is_entry = entries < count
    chosen = tl.load(ids + entries, mask=is_entry, other=0).to(tl.int32)
    tl.store(output_ids + tl.load(ring_slot) * row_width + entries, chosen, mask=is_entry)
    tl.store(table + tl.load(indices + entries, mask=is_entry, other=0), chosen, mask=is_entry)


_gumbel_parts = Launcher(_gumbel_kernel)
_best_of_parts = Launcher(_finish_kernel)
_finish_and_store = Launcher(_finish_and_store_kernel)
_store_ids = Launcher(_store_ids_kernel)


def draw(
    logits_NV: Tensor,
    rows_N: Tensor,
    lengths_N: Tensor,
    state: Tensor,
    *,
    has_filters: bool = False,
) -> Tensor:
    """Each row's likeliest id, or a draw from its softmax; int64 [N].

    ``state`` is int32 [R, WIDTH], see `sampling_state`; ``rows`` and ``lengths`` are int32, the
    lengths being tokens before the sampled one. An entry with row -1 reads no logits, and its
    id is undefined. Logits of any float dtype and row stride; on ties the lowest id wins.
    Top-k, top-p and min-p of rows take effect only with ``has_filters``. The twins are
    `candidates.argmax` and `draw.draw`. No host synchronisation, so a CUDA graph can hold the
    launch.
    """
    vocab_size = logits_NV.shape[1]
    scores, winners, tiles = _argmax_of_parts(
        logits_NV, rows_N, lengths_N, state, has_filters, 0
    )
    output = _finish(scores, winners, tiles, vocab_size, None)
    if has_filters:
        triton_filters.keep_to_filters(logits_NV, rows_N, lengths_N, state, output)
    return output


@dataclass(frozen=True, slots=True)
class IdTargets:
    """Where drawn ids go: to the next step and to the host."""

    indices: Tensor
    """int64 [N]: indices in the token table."""

    table: Tensor
    """int32 [R, L], contiguous: the token table."""

    output_ids: Tensor
    """int32 [T, N or more], from which ids are copied to the host."""

    ring_slot: Tensor
    """int32 [1] on the device: the row of ``output_ids`` for the ids."""


def draw_and_store(
    logits_NV: Tensor,
    rows_N: Tensor,
    lengths_N: Tensor,
    state: Tensor,
    target: IdTargets,
    *,
    has_filters: bool = False,
) -> None:
    """`draw`, and its ids written where the next step and the copy to the host read them.

    All that differs between steps is in the device's memory, so a CUDA graph can hold the
    launches.
    """
    vocab_size = logits_NV.shape[1]
    indices, table, output_ids, ring_slot = (
        target.indices,
        target.table,
        target.output_ids,
        target.ring_slot,
    )
    if has_filters:
        ids = draw(logits_NV, rows_N, lengths_N, state, has_filters=True)
        args: tuple[Any, ...] = (
            ids,
            indices,
            table,
            output_ids,
            ring_slot,
            len(ids),
            output_ids.stride(0),
        )
        _store_ids((num_tiles(len(ids), _IDS), 1), args, (_IDS,))
        return
    scores, winners, tiles = _argmax_of_parts(logits_NV, rows_N, lengths_N, state, False, 0)
    count, num_parts = scores.shape
    args = (
        scores, winners, indices, table, output_ids, ring_slot, num_parts, vocab_size,
        output_ids.stride(0),
    )  # fmt: skip
    _finish_and_store((count, 1), args, (padded_size(tiles),), num_warps=1)


def best_keys(
    logits_NS: Tensor, first_id: int, rows_N: Tensor, lengths_N: Tensor, state: Tensor
) -> Tensor:
    """`draw` from a shard of the vocabulary, as keys; the largest key over all shards is the
    draw.

    ``logits_NS`` are those of the ids from ``first_id`` on. A key, int64 [N], orders like
    (score, inverted id), and its low 31 bits are the inverted id. Filters are ignored. The twin
    is `candidates.argmax_over_shards`.
    """
    scores, winners, tiles = _argmax_of_parts(
        logits_NS, rows_N, lengths_N, state, False, first_id
    )
    return _finish(scores, winners, tiles, logits_NS.shape[1], first_id)


def _argmax_of_parts(
    logits_NV: Tensor,
    rows_N: Tensor,
    lengths_N: Tensor,
    state: Tensor,
    has_filters: bool,
    first_id: int,
) -> tuple[Tensor, Tensor, int]:
    """Scores and winners [N, P] of the parts of each row, and the tiles of a row."""
    count, vocab_size = logits_NV.shape
    device = logits_NV.device
    tiles = num_tiles(vocab_size, _TILE)
    tiles_each = min(num_tiles(tiles * count, _PROGRAMS), _MAX_TILES)
    num_parts = num_tiles(tiles, tiles_each)
    scores = torch.empty((count, num_parts), dtype=torch.float32, device=device)
    winners = torch.empty((count, num_parts), dtype=torch.int32, device=device)
    args = (
        logits_NV, rows_N, lengths_N, state, scores, winners, logits_NV.stride(0), vocab_size,
        tiles, num_parts, tiles_each, int(has_filters),
    )  # fmt: skip
    _gumbel_parts((count, num_parts), args, (_TILE, first_id))
    return scores, winners, tiles


def _finish(
    scores_NP: Tensor,
    winners_NP: Tensor,
    tiles: int,
    vocab_size: int,
    first_id: int | None,
) -> Tensor:
    """The best id of each row, int64 [N], or its key in a shard from ``first_id`` on."""
    count, num_parts = scores_NP.shape
    output = torch.empty(count, dtype=torch.int64, device=scores_NP.device)
    args = (scores_NP, winners_NP, output, num_parts, vocab_size, first_id or 0)
    constants = (first_id is not None, padded_size(tiles))
    _best_of_parts((count, 1), args, constants, num_warps=1)
    return output
