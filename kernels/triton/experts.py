"""A mixture of experts on a GPU: sort by expert, grouped products, without host sync."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.routing import ExpertForm
from trimaran.kernels.tables.grouped_table import TritonCut
from trimaran.kernels.triton.launch import Launcher, num_tiles, padded_size

# Shapes: T tokens, D hidden size, X experts of this rank, C experts of a token, N = T C choices
# (token t's c-th choice is number t C + c), F inner width, E = 2 F.

_SORT_VALUES = 16384
"""Choices times experts, or pairs of choices, that a program of the sort processes."""

_MIN_PAIRED = 64
"""Experts, padded, from which the sort compares each two choices of a block. With scans the
sort of 2,048 choices of 128 experts takes 14 us on an H200; 16 layers of `qwen3_30b` take
6.20 ms with pairs and 6.26 with scans for 256 tokens."""

_COUNTED = 16
"""The most blocks of choices whose counts each program of the sort adds up itself."""

_SCANNED_EXPERTS, _SCANNED_BLOCKS = 8, 64
"""Experts of a program of the scan, and blocks at a time."""

_SUM_TILE = 1024
FIXED_ROWS = 64
"""The height of tiles for any number of choices, if the order of sums must not change."""

_GROUP = 8
"""Tiles of rows that process the same columns at about the same time, for the cache."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _owned(  # type: ignore[no-untyped-def]
    ids, assignments, num_assignments, first_expert, EXPERTS: tl.constexpr, PADDED: tl.constexpr
):
    """[choices, experts]: 1 where a choice is this expert of this rank."""
    owners = tl.load(ids + assignments, mask=assignments < num_assignments, other=-1)
    owners -= first_expert
    experts = tl.arange(0, PADDED)[None, :]
    return ((owners[:, None] == experts) & (experts < EXPERTS)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _number_of_equals_before(ids, assignments, num_assignments):  # type: ignore[no-untyped-def]
    """For each choice of a block the number of earlier choices of the same expert."""
    own, others = assignments[:, None], assignments[None, :]
    expert = tl.load(ids + own, mask=own < num_assignments, other=-1)
    theirs = tl.load(ids + others, mask=others < num_assignments, other=-1)
    return tl.sum(((expert == theirs) & (others < own)).to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["num_assignments"])  # type: ignore[untyped-decorator,unused-ignore]
def _count_kernel(  # type: ignore[no-untyped-def]
    ids, counts, num_assignments, first_expert, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program b counts how often each expert was chosen in the b-th block of choices."""
    block = tl.program_id(0)
    assignments = block * BLOCK + tl.arange(0, BLOCK)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    owned = _owned(ids, assignments, num_assignments, first_expert, EXPERTS, PADDED)
    tl.store(counts + block * PADDED + tl.arange(0, PADDED), tl.sum(owned, axis=0))


@triton.jit(do_not_specialize=["num_blocks"])  # type: ignore[untyped-decorator,unused-ignore]
def _scan_kernel(  # type: ignore[no-untyped-def]
    counts, totals, num_blocks, PADDED: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program i replaces each block's counts of its ``EXPERTS`` experts by the sums of the
    blocks before, and writes the sums of all blocks.
    """
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    before = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_blocks, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        places = counts + blocks[:, None] * PADDED + experts[None, :]
        is_block = (blocks < num_blocks)[:, None]
        found = tl.load(places, mask=is_block, other=0)
        tl.store(places, before[None, :] + tl.cumsum(found, axis=0) - found, mask=is_block)
        before += tl.sum(found, axis=0)
    tl.store(totals + experts, before)


@triton.jit(do_not_specialize=["num_assignments", "num_blocks"])  # type: ignore[untyped-decorator,unused-ignore]
def _sort_kernel(  # type: ignore[no-untyped-def]
    ids, counts, order, totals, positions, num_assignments, num_blocks, first_expert,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr,
    IS_ALONE: tl.constexpr, IS_SCANNED: tl.constexpr, IN_PAIRS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program b writes the sorted positions of the b-th block's choices.

    In a launch of one program the program also counts the choices. With ``IS_SCANNED`` counts
    are those of the blocks before, and ``totals`` are known; otherwise each program adds up the
    counts of at most ``COUNTED`` blocks. A choice stands behind the earlier choices of its
    expert in the block. ``IN_PAIRS`` compares each two choices, which takes much less time than
    a scan over the choices of each expert where there are many experts.
    """
    block = tl.program_id(0)
    experts = tl.arange(0, PADDED)
    assignments = block * BLOCK + tl.arange(0, BLOCK)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    owned = _owned(ids, assignments, num_assignments, first_expert, EXPERTS, PADDED)
    before = tl.zeros((PADDED,), tl.int32)
    if IS_ALONE:
        total = tl.sum(owned, axis=0)
    elif IS_SCANNED:
        total = tl.load(totals + experts)
        before += tl.load(counts + block * PADDED + experts)
    else:
        blocks = tl.arange(0, COUNTED)
        source = counts + blocks[:, None] * PADDED + experts[None, :]
        found = tl.load(source, mask=(blocks < num_blocks)[:, None], other=0)
        total = tl.sum(found, axis=0)
        before += tl.sum(tl.where((blocks < block)[:, None], found, 0), axis=0)
    starts = tl.cumsum(total, axis=0) - total + before
    if IN_PAIRS:
        target = tl.sum(starts[None, :] * owned, axis=1)
        target += _number_of_equals_before(ids, assignments, num_assignments)
    else:
        targets = starts[None, :] + tl.cumsum(owned, axis=0) - owned
        target = tl.sum(targets * owned, axis=1)
    is_owned = tl.sum(owned, axis=1) > 0
    tl.store(order + target, assignments, mask=is_owned)
    tl.store(
        positions + assignments,
        tl.where(is_owned, target, -1),
        mask=assignments < num_assignments,
    )
    if not IS_SCANNED:  # noqa: SIM102 (the compiler removes the branch of a constant)
        if block == 0:
            tl.store(totals + experts, total)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def find_tile(counts, tile, PADDED: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile's expert, its first row among the expert's, their number, and the number of
    rows before the expert's.
    """
    experts = tl.arange(0, PADDED)
    tiles = (counts + ROWS - 1) // ROWS
    is_before = tl.cumsum(tiles, axis=0) <= tile
    expert = tl.sum(is_before.to(tl.int32), axis=0)
    first = (tile - tl.sum(tl.where(is_before, tiles, 0), axis=0)) * ROWS
    count = tl.sum(tl.where(experts == expert, counts, 0), axis=0)
    before = tl.sum(tl.where(is_before, counts, 0), axis=0)
    return expert, first, count, before


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _load(pointers, is_inside, IS_EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values at these addresses; with ``IS_EVEN`` all of them are valid, else zero
    outside.
    """
    if IS_EVEN:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=is_inside, other=0.0)
    return values


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def glu(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """SwiGLU; with ``ALPHA`` that of `ExpertForm`, which keeps NaN."""
    if ALPHA > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        result = gate / (1.0 + tl.exp(-ALPHA * gate)) * up
    else:
        result = gate / (1.0 + tl.exp(-gate)) * up
    return result


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def finished(  # type: ignore[no-untyped-def]
    total, up, bias, is_biased, routing_weights, is_row, OUTPUTS: tl.constexpr,
    IS_GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Sums [COLUMNS, ROWS] as a grouped product stores them: with ``ALPHA`` plus the biases at
    the columns' addresses, then SwiGLU, or times the choices' weights at the rows' addresses.
    """
    if ALPHA > 0:
        total += tl.load(bias, mask=is_biased, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            up += tl.load(bias + OUTPUTS, mask=is_biased, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        total = glu(total, up, ALPHA, LIMIT)
    else:
        total = total * tl.load(routing_weights, mask=is_row, other=0.0)[None, :]
    return total


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _experts_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, output, order, totals, routing_weights, x_stride, INNER: tl.constexpr,
    OUTPUTS: tl.constexpr, CHOSEN: tl.constexpr, PADDED: tl.constexpr,
    IS_GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, IS_EVEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes ``COLUMNS`` outputs of up to ``ROWS`` choices of one expert.

    With ``ALPHA`` outputs have biases [X, outputs], and SwiGLU is that of `ExpertForm`.
    ``IS_GATED``: SwiGLU of the choices' tokens, in the order by expert. Otherwise: products of
    rows in this order, times the choices' weights, each stored at its choice. Programs behind
    the last tile, whose number is on the device only, end at once.
    """
    NUM_COLUMNS: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    counts = tl.load(totals + tl.arange(0, PADDED))
    last = tl.sum((counts + ROWS - 1) // ROWS, axis=0)
    program = tl.program_id(0)
    if program < last * NUM_COLUMNS:
        first_tile = program // (GROUP * NUM_COLUMNS) * GROUP
        height = tl.minimum(last - first_tile, GROUP)
        within = program % (GROUP * NUM_COLUMNS)
        tile = first_tile + within % height
        expert, first_row, count, before = find_tile(counts, tile, PADDED, ROWS)
        rows = first_row + tl.arange(0, ROWS)
        is_row = rows < count
        rows += before
        assignments = tl.load(order + rows, mask=is_row, other=0)
        source = assignments // CHOSEN if IS_GATED else tl.where(is_row, rows, 0)
        columns = within // height * COLUMNS + tl.arange(0, COLUMNS)
        inner = tl.arange(0, STEP)
        HEIGHT: tl.constexpr = OUTPUTS * 2 if IS_GATED else OUTPUTS
        matrix = weight + (expert.to(tl.int64) * HEIGHT + columns)[:, None] * INNER + inner
        tokens = x + source[None, :].to(tl.int64) * x_stride + inner[:, None]
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        up = tl.zeros([COLUMNS, ROWS], tl.float32)
        is_output = columns < OUTPUTS
        is_column = is_output[:, None]
        for first in range(0, INNER, STEP):
            is_inner = inner + first < INNER
            values = _load(tokens + first, is_inner[:, None], IS_EVEN)
            is_value = is_column & is_inner[None, :]
            gate = _load(matrix + first, is_value, IS_EVEN)
            total = tl.dot(gate, values, total, input_precision="ieee")
            if IS_GATED:
                upper = _load(matrix + OUTPUTS * INNER + first, is_value, IS_EVEN)
                up = tl.dot(upper, values, up, input_precision="ieee")
        total = finished(
            total, up, bias + expert * HEIGHT + columns, is_output,
            routing_weights + assignments, is_row, OUTPUTS, IS_GATED, ALPHA, LIMIT,
        )  # fmt: skip
        target = rows if IS_GATED else assignments
        place = output + target[None, :].to(tl.int64) * OUTPUTS + columns[:, None]
        tl.store(place, total.to(output.dtype.element_ty), mask=is_row[None, :] & is_column)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sum_kernel(  # type: ignore[no-untyped-def]
    parts, ids, output, first_expert, WIDTH: tl.constexpr, EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (t, i) adds up the i-th tile of the outputs of token t's experts on this rank,
    each in ``SHARES`` sums."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = columns < WIDTH
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((TILE,), tl.float32)
    for place in tl.static_range(CHOSEN * SHARES):
        owner = tl.load(ids + token * CHOSEN + place // SHARES) - first_expert
        is_here = (owner >= 0) & (owner < EXPERTS)
        source = parts + (token * CHOSEN * SHARES + place) * WIDTH + columns
        total += tl.load(source, mask=is_column & is_here, other=0.0)
    target = output + token * WIDTH + columns
    tl.store(target, total.to(output.dtype.element_ty), mask=is_column)


_count = Launcher(_count_kernel)
_scan = Launcher(_scan_kernel)
_sort = Launcher(_sort_kernel)
_multiply = Launcher(_experts_kernel)
_sum = Launcher(_sum_kernel)


def likely_cut(average: int, dtype: torch.dtype) -> TritonCut:
    """The tile height close to an expert's ``average`` number of rows, from 16 to 128."""
    rows = min(max(padded_size(average), 16), 128)
    # Float32 values take twice the memory.
    share = dtype.itemsize // 2
    if rows <= 32:
        return TritonCut(rows, 64, 128 // share, 4, 3)
    return TritonCut(rows, 128, 64 // share, 8, 3)


class SortedAssignments(NamedTuple):
    """Choices sorted by expert: their order, and the number of each expert's choices."""

    order: Tensor
    """[N]; entries behind those of this rank's experts are uninitialised."""

    totals: Tensor
    """[X], padded to a power of two with zeros."""

    positions: Tensor
    """[T, C]: the position of each choice in that order, -1 for an expert of another rank."""


def expert_mlp(
    x_TD: Tensor,
    weights_TC: Tensor,
    ids_TC: Tensor,
    gate_up_XED: Tensor,
    down_XDF: Tensor,
    first_expert: int = 0,
    form: ExpertForm | None = None,
    cuts: tuple[TritonCut, TritonCut] | None = None,
) -> Tensor:
    """The weighted sum of each token's experts; see `Ops.expert_mlp`.

    Rows of ``x`` are contiguous, all other tensors are fully contiguous. The host does not read
    the choices: grids depend on the number of tokens alone, so this is safe under CUDA graph
    capture. ``cuts`` are the tile shapes of the two products; with equal cuts for any number of
    tokens, a token's result does not depend on the other tokens.
    """
    hidden = x_TD.shape[1]
    num_experts, _, inner = down_XDF.shape
    num_assignments = ids_TC.numel()
    if not num_assignments:
        return torch.empty_like(x_TD)
    by_expert = sort_assignments(ids_TC, num_experts, first_expert)
    if cuts is None:
        cut = likely_cut(num_tiles(num_assignments, num_experts), x_TD.dtype)
        cuts = cut, cut
    inner_NF = torch.empty((num_assignments, inner), dtype=x_TD.dtype, device=x_TD.device)
    operands = x_TD, gate_up_XED, inner_NF
    _products(cuts[0], by_expert, operands, weights_TC, form, is_gated=True)
    parts_ND = torch.empty((num_assignments, hidden), dtype=torch.float32, device=x_TD.device)
    operands = inner_NF, down_XDF, parts_ND
    _products(cuts[1], by_expert, operands, weights_TC, form, is_gated=False)
    return add_parts(parts_ND, ids_TC, num_experts, first_expert, x_TD)


def add_parts(
    parts_ND: Tensor, ids_TC: Tensor, num_experts: int, first_expert: int, like: Tensor
) -> Tensor:
    """The sums [T, D] of the parts of each token's experts on this rank, in the dtype of
    ``like``.

    ``parts`` has as many rows for each choice [N, D], side by side, as it is longer than N.
    """
    (num_tokens, num_chosen), hidden = ids_TC.shape, parts_ND.shape[1]
    output_TD = torch.empty((num_tokens, hidden), dtype=like.dtype, device=like.device)
    tile = min(padded_size(hidden), _SUM_TILE)
    shares = parts_ND.shape[0] // ids_TC.numel()
    constants = (hidden, num_experts, num_chosen, shares, tile)
    grid = (num_tokens, num_tiles(hidden, tile))
    _sum(grid, (parts_ND, ids_TC, output_TD, first_expert), constants)
    return output_TD


def sort_assignments(ids_TC: Tensor, num_experts: int, first_expert: int) -> SortedAssignments:
    """The choices of this rank's experts in the order of the experts."""
    num_assignments, padded = ids_TC.numel(), padded_size(num_experts)
    most = max(_SORT_VALUES // padded, 16)
    in_pairs = padded >= _MIN_PAIRED
    if in_pairs:
        most = min(most, math.isqrt(_SORT_VALUES))
    block = min(padded_size(max(num_assignments, 16)), most)
    num_blocks = num_tiles(num_assignments, block)
    sizes = [padded, num_blocks * padded, num_assignments, num_assignments]
    totals, counts, order, positions = _split(sizes, ids_TC.device)
    constants = (num_experts, padded, block)
    is_alone, is_scanned = num_blocks == 1, num_blocks > _COUNTED
    if not is_alone:
        _count((num_blocks, 1), (ids_TC, counts, num_assignments, first_expert), constants)
    if is_scanned:
        columns = min(padded, _SCANNED_EXPERTS)
        grid = (padded // columns, 1)
        _scan(grid, (counts, totals, num_blocks), (padded, columns, _SCANNED_BLOCKS))
    args = (ids_TC, counts, order, totals, positions, num_assignments, num_blocks, first_expert)
    # More than 32 values a thread would not fit in the registers.
    num_warps = min(max(block * max(padded, block * in_pairs) // 512, 4), 16)
    of_sort = (*constants, _COUNTED, is_alone, is_scanned, in_pairs)
    _sort((num_blocks, 1), args, of_sort, num_warps)
    return SortedAssignments(order, totals, positions.view(ids_TC.shape))


def _split(sizes: list[int], device: torch.device) -> list[Tensor]:
    """Views of one int32 tensor, each aligned to 16 bytes. Triton compiles unaligned
    pointers separately, and alignment would otherwise depend on the number of tokens.
    """
    whole = [-(-size // 4) * 4 for size in sizes]
    memory = torch.empty(sum(whole), dtype=torch.int32, device=device)
    pieces = torch.split(memory, whole)
    pairs = zip(pieces, sizes, strict=True)
    return [piece if len(piece) == size else piece[:size] for piece, size in pairs]


def _products(
    cut: TritonCut,
    by_expert: SortedAssignments,
    operands: tuple[Tensor, Tensor, Tensor],
    weights_TC: Tensor,
    form: ExpertForm | None,
    *,
    is_gated: bool,
) -> None:
    """One of the two grouped products: ``operands`` are rows, matrices, and the output."""
    x, matrices, output = operands
    (num_assignments, outputs), num_experts = output.shape, matrices.shape[0]
    inner, num_chosen = matrices.shape[2], weights_TC.shape[1]
    # Each expert with rows has at most one tile that is not full.
    tiles = num_assignments // cut.rows + min(num_experts, num_assignments)
    is_even = inner % cut.step == 0 and outputs % cut.columns == 0
    bias, alpha, limit = form_arguments(form, matrices, is_gated=is_gated)
    args = (
        x, matrices, bias, output, by_expert.order, by_expert.totals, weights_TC, x.stride(0),
    )  # fmt: skip
    constants = (
        inner, outputs, num_chosen, padded_size(num_experts), is_gated, alpha, limit, cut.rows,
        cut.columns, cut.step, _GROUP, is_even,
    )  # fmt: skip
    grid = (tiles * num_tiles(outputs, cut.columns), 1)
    _multiply(grid, args, constants, num_warps=cut.num_warps, num_stages=cut.num_stages)


def form_arguments(
    form: ExpertForm | None, unused: Tensor, *, is_gated: bool
) -> tuple[Tensor, float, float]:
    """The biases of one of the products, ``unused`` without a form, and `glu`'s constants."""
    if form is None:
        return unused, 0.0, 0.0
    bias = form.gate_up_bias if is_gated else form.down_bias
    return bias, form.alpha, form.limit
