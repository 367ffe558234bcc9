"""Top-k, top-p and min-p on a GPU without sorting a vocabulary and without host sync.

A row with top-k lists the ids that can be among its k best, found by the maxima of groups of
ids, and sorts only these. A row with other filters first draws from all ids. In the order of
descending logits, a filter keeps a prefix: a rejected draw excludes its id and all later ids.
The next draw is made from the earlier ids, from a list again if the earlier ids are few.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from trimaran.kernels import sampling_state
from trimaran.kernels.triton import gumbel as triton_gumbel

# Shapes: N sampled rows, V vocabulary, R rows.

_WIDTH = tl.constexpr(sampling_state.WIDTH)
_TEMPERATURE = tl.constexpr(sampling_state.TEMPERATURE)
_NUM_PROMPT = tl.constexpr(sampling_state.NUM_PROMPT)
_TOP_K = tl.constexpr(sampling_state.TOP_K)
_TOP_P = tl.constexpr(sampling_state.TOP_P)
_MIN_P = tl.constexpr(sampling_state.MIN_P)
_TOP_P_DECAY = tl.constexpr(sampling_state.TOP_P_DECAY)
_TOP_P_MIN = tl.constexpr(sampling_state.TOP_P_MIN)

_TILE = 4096
_GROUP = tl.constexpr(64)
_LIST = 512
"""Ids that a row's list holds; a row with more candidates counts over its vocabulary."""

_WARPS = 8
"""Tile of the single program of a row, which repeats rejected draws."""

_MIN_KEY = tl.constexpr(-(1 << 31))
_NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sort_key(x):  # type: ignore[no-untyped-def]
    """An int32 that orders as float32 ``x`` does; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _of_sort_key(key):  # type: ignore[no-untyped-def]
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _load_row(source, ids, vocab_size):  # type: ignore[no-untyped-def]
    return tl.load(source + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _filters_of(own, length, vocab_size):  # type: ignore[no-untyped-def]
    """Temperature, top-k (0: none), top-p of this position and min-p of a row's state."""
    temperature = triton_gumbel.load_float(own + _TEMPERATURE)
    top_k = tl.load(own + _TOP_K)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    top_p = triton_gumbel.load_float(own + _TOP_P)
    decay = triton_gumbel.load_float(own + _TOP_P_DECAY)
    num_outputs = length - tl.load(own + _NUM_PROMPT)
    if (decay != 1.0) & (num_outputs > 0):
        decayed = top_p * tl.exp2(num_outputs.to(tl.float32) * tl.log2(decay))
        top_p = tl.maximum(decayed, triton_gumbel.load_float(own + _TOP_P_MIN))
    return temperature, top_k, top_p, triton_gumbel.load_float(own + _MIN_P)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _has_filter(temperature, top_k, top_p, min_p):  # type: ignore[no-untyped-def]
    return (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _survey_kernel(  # type: ignore[no-untyped-def]
    logits, rows, lengths, state, output, maxima, masses, row_stride, vocab_size, num_tiles,
    TILE: tl.constexpr,
):  # fmt: skip
    """For one tile of one row: the maxima of its groups and, relative to the largest maximum,
    the mass of the tile and the mass of the tile's ids before the drawn id.
    """
    entry, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + entry)
    own = state + tl.maximum(row, 0).to(tl.int64) * _WIDTH
    length = tl.load(lengths + entry)
    temperature, top_k, top_p, min_p = _filters_of(own, length, vocab_size)
    if (row >= 0) & _has_filter(temperature, top_k, top_p, min_p):
        groups = tl.arange(0, TILE // _GROUP)
        ids = tile * TILE + groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        x = _load_row(logits + entry.to(tl.int64) * row_stride, ids, vocab_size)
        largest = tl.max(x, 1)
        place = entry.to(tl.int64) * num_tiles + tile
        tl.store(maxima + place * (TILE // _GROUP) + groups, largest)
        if top_k == 0:
            top = tl.maximum(tl.max(largest, 0), -3e38)
            mass = tl.exp2((x - top) * (1.4426950408889634 / temperature))
            drawn = tl.load(output + entry).to(tl.int32)
            bound = tl.load(logits + entry.to(tl.int64) * row_stride + drawn).to(tl.float32)
            before = tl.where(triton_gumbel.is_before(x, ids, bound, drawn), mass, 0.0)
            tl.store(masses + 2 * place, tl.sum(mass))
            tl.store(masses + 2 * place + 1, tl.sum(before))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _mass_before(  # type: ignore[no-untyped-def]
    source, vocab_size, num_tiles, bound, bound_id, top, temperature, TILE: tl.constexpr
):
    """The mass, relative to ``top``'s, of the ids before (bound, bound_id); float64."""
    scale = 1.4426950408889634 / temperature
    sums = tl.zeros([TILE], tl.float32)
    for tile in range(num_tiles):
        ids = tile * TILE + tl.arange(0, TILE)
        x = _load_row(source, ids, vocab_size)
        is_in = triton_gumbel.is_before(x, ids, bound, bound_id)
        sums += tl.where(is_in, tl.exp2((x - top) * scale), 0.0)
    return tl.sum(sums.to(tl.float64), 0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _count(source, vocab_size, num_tiles, low, high, end_id, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many ids below ``end_id`` have a sort key from ``low`` to below ``high``."""
    counts = tl.zeros([TILE], tl.int32)
    for tile in range(num_tiles):
        ids = tile * TILE + tl.arange(0, TILE)
        key = _sort_key(_load_row(source, ids, vocab_size)).to(tl.int64)
        is_in = (key >= low) & (key < high) & (ids < vocab_size) & (ids < end_id)
        counts += is_in.to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _end_of_top_k(source, vocab_size, num_tiles, top_k, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bound before which exactly ``top_k`` ids come, by bisection: its logit and id."""
    low = tl.full([], _MIN_KEY, tl.int64)
    high = -low
    while high - low > 1:
        middle = (low + high) >> 1
        if _count(source, vocab_size, num_tiles, middle, 1 << 32, _NO_ID, TILE) >= top_k:
            low = middle
        else:
            high = middle
    missing = top_k - _count(source, vocab_size, num_tiles, high, 1 << 32, _NO_ID, TILE)
    # The lowest ids among equal logits.
    first, end = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32) + vocab_size
    while end - first > 1:
        middle_id = (first + end) >> 1
        if _count(source, vocab_size, num_tiles, low, high, middle_id, TILE) >= missing:
            end = middle_id
        else:
            first = middle_id
    return _of_sort_key(low.to(tl.int32)), end


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _floor_of_top_k(keys, is_group, num_groups, top_k):  # type: ignore[no-untyped-def]
    """A sort key that at least ``top_k`` group maxima reach, and not many more."""
    low = tl.full([], _MIN_KEY, tl.int64)
    high = tl.max(keys, 0).to(tl.int64) + 1
    reaching = tl.full([], 0, tl.int32) + num_groups
    # A slightly low floor costs less than one more round.
    while (high - low > 1) & (reaching > top_k + (top_k >> 3)):
        middle = (low + high) >> 1
        count = tl.sum(((keys.to(tl.int64) >= middle) & is_group).to(tl.int32), 0)
        if count >= top_k:
            low = middle
            reaching = count
        else:
            high = middle
    return low


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _list_from(  # type: ignore[no-untyped-def]
    source, vocab_size, groups, keys, is_group, groups_found, listed, low, LIST: tl.constexpr
):
    """List all ids whose sort key is at least ``low``, found by their groups' maxima ``keys``.

    Writes (sort key, inverted id) as int64. Returns their number, or any number above ``LIST``
    if more ids qualify.
    """
    is_found = ((keys.to(tl.int64) >= low) & is_group).to(tl.int32)
    tl.store(groups_found + tl.cumsum(is_found, 0) - 1, groups, mask=is_found > 0)
    num_found = tl.sum(is_found, 0)
    # Other threads load what some threads stored.
    tl.debug_barrier()
    num_listed = tl.full([], 0, tl.int32)
    if num_found > LIST:
        num_listed = num_found
        num_found = tl.full([], 0, tl.int32)
    for start in range(0, num_found, _GROUP):
        places = start + tl.arange(0, _GROUP)
        group = tl.load(groups_found + places, mask=places < num_found, other=_NO_ID // _GROUP)
        ids = tl.ravel(group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :])
        key = _sort_key(_load_row(source, ids, vocab_size)).to(tl.int64)
        is_listed = ((key >= low) & (ids < vocab_size)).to(tl.int32)
        place = num_listed + tl.cumsum(is_listed, 0) - 1
        item = (key << 32) | (ids ^ _NO_ID).to(tl.int64)
        tl.store(listed + place, item, mask=(is_listed > 0) & (place < LIST))
        num_listed += tl.sum(is_listed, 0)
    tl.debug_barrier()
    return num_listed


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _draw_from_list(  # type: ignore[no-untyped-def]
    listed, num_listed, temperature, top_k, top_p, min_p, first_key, second_key, total,
    LIST: tl.constexpr,
):  # fmt: skip
    """Top-k, then top-p over the remaining mass, then min-p, and the draw.

    Without top-k, top-p is over ``total``, the mass relative to the likeliest of all ids.
    """
    rank = tl.arange(0, LIST)
    worst = tl.full([], -(1 << 63), tl.int64)
    item = tl.sort(tl.load(listed + rank, mask=rank < num_listed, other=worst), descending=True)
    x = _of_sort_key((item >> 32).to(tl.int32))
    ids = (item & _NO_ID).to(tl.int32) ^ _NO_ID
    num_kept = tl.where(top_k > 0, tl.minimum(top_k, num_listed), num_listed)
    is_in = rank < num_kept
    x = tl.where(is_in, x, float("-inf"))
    tempered = tl.div_rn(x, temperature)
    mass = tl.where(is_in, tl.exp((tempered - tl.max(tempered, 0)).to(tl.float64)), 0.0)
    total = tl.where(top_k > 0, tl.sum(mass, 0), total)
    before = tl.cumsum(mass, 0) - mass
    most = tl.where(top_p < 1.0, top_p.to(tl.float64) * total, float("inf"))
    is_left = (before < most) & (mass >= min_p.to(tl.float64))
    # The likeliest id always stays, for any parameters.
    is_in = is_in & (is_left | (rank == 0))
    score = tempered + triton_gumbel.gumbel(ids, first_key, second_key)
    score = tl.where(is_in, score, float("-inf"))
    return tl.min(tl.where(score == tl.max(score, 0), ids, _NO_ID), 0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _settle(  # type: ignore[no-untyped-def]
    source, vocab_size, num_tiles, temperature, first_key, second_key, top_p, min_p, bound,
    winner, top, total, TILE: tl.constexpr,
):  # fmt: skip
    """Draw from the ids before (bound, winner) until one passes top-p and min-p."""
    is_done = tl.full([], 0, tl.int32)
    while is_done == 0:
        score, drawn = triton_gumbel.gumbel_argmax(
            source, vocab_size, 0, num_tiles, temperature, first_key, second_key, bound, winner,
            True, TILE,
        )  # fmt: skip
        if score > float("-inf"):
            winner = drawn
            bound = tl.load(source + drawn).to(tl.float32)
            relative = ((bound - top) / temperature).to(tl.float64)
            is_done = (tl.exp(relative) >= min_p).to(tl.int32)
            if (is_done == 1) & (top_p < 1.0):
                mass = _mass_before(
                    source, vocab_size, num_tiles, bound, winner, top, temperature, TILE
                )
                is_done = (mass < top_p.to(tl.float64) * total).to(tl.int32)
        else:
            # No id precedes the likeliest id, which always stays, for any parameters.
            is_done = tl.full([], 1, tl.int32)
    return winner


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _check_draw(  # type: ignore[no-untyped-def]
    masses, highest, num_tiles, temperature, top_p, min_p, bound, top, PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Whether a draw from all ids, with logit ``bound``, passes; and the mass of all ids."""
    tiles = tl.arange(0, PADDED)
    is_tile = tiles < num_tiles
    mass = tl.load(masses + 2 * tiles, mask=is_tile, other=0.0).to(tl.float64)
    before = tl.load(masses + 2 * tiles + 1, mask=is_tile, other=0.0).to(tl.float64)
    of_tile = tl.max(tl.reshape(highest, [PADDED, GROUPS // PADDED]), 1)
    scale = tl.exp(((of_tile - top) / temperature).to(tl.float64))
    total = tl.sum(mass * scale, 0)
    most = tl.where(top_p < 1.0, top_p.to(tl.float64) * total, float("inf"))
    relative = ((bound - top) / temperature).to(tl.float64)
    has_passed = (tl.sum(before * scale, 0) < most) & (tl.exp(relative) >= min_p)
    return has_passed.to(tl.int32), total


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _filter_row(  # type: ignore[no-untyped-def]
    source, own, length, winner, maxima, masses, groups_found, listed, vocab_size, num_tiles,
    GROUPS: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The draw with a row's filters; ``winner`` is one from all ids."""
    temperature, top_k, top_p, min_p = _filters_of(own, length, vocab_size)
    groups, num_groups = tl.arange(0, GROUPS), num_tiles * (TILE // _GROUP)
    is_group = groups < num_groups
    highest = tl.load(maxima + groups, mask=is_group, other=float("-inf"))
    keys = _sort_key(highest)
    top = tl.max(highest, 0)
    bound = tl.load(source + winner).to(tl.float32)
    total = tl.full([], 0.0, tl.float64)
    is_settled = tl.full([], 0, tl.int32)
    if top_k > 0:
        low = _floor_of_top_k(keys, is_group, num_groups, top_k)
    else:
        is_settled, total = _check_draw(
            masses, highest, num_tiles, temperature, top_p, min_p, bound, top, PADDED, GROUPS
        )
        # All ids after the least likely id that min-p keeps are excluded as well.
        least = top + temperature * tl.log(tl.maximum(min_p, 1e-37))
        least -= 1e-5 * (tl.abs(least) + tl.abs(top))
        least = tl.where(min_p > 0.0, least, bound)
        winner = tl.where(bound < least, _NO_ID, winner)
        bound = tl.maximum(bound, least)
        low = _sort_key(bound).to(tl.int64)
    if is_settled == 0:
        first_key, second_key = triton_gumbel.noise_keys(own, length)
        num_listed = _list_from(
            source, vocab_size, groups, keys, is_group, groups_found, listed, low, LIST
        )
        if num_listed <= LIST:
            winner = _draw_from_list(
                listed, num_listed, temperature, top_k, top_p, min_p, first_key, second_key,
                total, LIST,
            )  # fmt: skip
        else:
            if top_k > 0:
                bound, winner = _end_of_top_k(source, vocab_size, num_tiles, top_k, TILE)
                total = _mass_before(
                    source, vocab_size, num_tiles, bound, winner, top, temperature, TILE
                )
            winner = _settle(
                source, vocab_size, num_tiles, temperature, first_key, second_key, top_p,
                min_p, bound, winner, top, total, TILE,
            )  # fmt: skip
    return winner


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _filter_kernel(  # type: ignore[no-untyped-def]
    logits, rows, lengths, state, maxima, masses, groups_found, listed, output, row_stride,
    vocab_size, num_tiles, GROUPS: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Replace one row's draw from all ids by the draw with its filters."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry)
    own = state + tl.maximum(row, 0).to(tl.int64) * _WIDTH
    length = tl.load(lengths + entry)
    temperature, top_k, top_p, min_p = _filters_of(own, length, vocab_size)
    if (row >= 0) & _has_filter(temperature, top_k, top_p, min_p):
        num_groups = num_tiles * (TILE // _GROUP)
        winner = _filter_row(
            logits + entry * row_stride, own, length, tl.load(output + entry).to(tl.int32),
            maxima + entry * num_groups, masses + 2 * entry * num_tiles,
            groups_found + entry * num_groups, listed + entry * LIST, vocab_size, num_tiles,
            GROUPS, LIST, TILE, PADDED,
        )  # fmt: skip
        tl.store(output + entry, tl.minimum(winner, vocab_size - 1).to(tl.int64))


def keep_to_filters(
    logits_NV: Tensor, rows_N: Tensor, lengths_N: Tensor, state: Tensor, output_N: Tensor
) -> None:
    """Replace the draws in ``output`` of rows whose state has top-k, top-p or min-p.

    ``output`` holds draws from all ids (any value for rows with top-k); the other arguments are
    those of `triton_sampling.draw`. The twin is `draw.draw`.
    """
    count, vocab_size = logits_NV.shape
    device = logits_NV.device
    num_tiles = triton.cdiv(vocab_size, _TILE)
    num_groups = num_tiles * (_TILE // _GROUP.value)
    maxima = torch.empty((count, num_groups), dtype=torch.float32, device=device)
    masses = torch.empty((count, num_tiles, 2), dtype=torch.float32, device=device)
    groups_found = torch.empty((count, num_groups), dtype=torch.int32, device=device)
    listed = torch.empty((count, _LIST), dtype=torch.int64, device=device)
    _survey_kernel[(count, num_tiles)](
        logits_NV, rows_N, lengths_N, state, output_N, maxima, masses, logits_NV.stride(0),
        vocab_size, num_tiles, TILE=_TILE, num_warps=4,
    )  # fmt: skip
    _filter_kernel[(count,)](
        logits_NV, rows_N, lengths_N, state, maxima, masses, groups_found, listed, output_N,
        logits_NV.stride(0), vocab_size, num_tiles, **_filter_constants(num_tiles),
    )  # fmt: skip


def compile_filters(device: torch.device, logits_dtype: torch.dtype, vocab_size: int) -> None:
    """Compile the kernel that takes Triton the longest, some seconds, without a launch.

    Safe in a thread beside other threads. The kernel is the one that `keep_to_filters` launches
    for dense logits [N, V] of this dtype.
    """
    num_tiles = triton.cdiv(vocab_size, _TILE)
    with torch.cuda.device(device):
        _filter_kernel.warmup(
            logits_dtype, torch.int32, torch.int32, torch.int32, torch.float32, torch.float32,
            torch.int32, torch.int64, torch.int64, vocab_size, vocab_size, num_tiles,
            grid=(1,), **_filter_constants(num_tiles),
        )  # fmt: skip


def _filter_constants(num_tiles: int) -> dict[str, int]:
    padded = triton.next_power_of_2(num_tiles)
    groups = padded * (_TILE // _GROUP.value)
    return {
        "GROUPS": groups, "LIST": _LIST, "TILE": _TILE, "PADDED": padded, "num_warps": _WARPS,
    }  # fmt: skip
