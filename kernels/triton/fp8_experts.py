"""A mixture of experts in FP8 on a GPU: grouped products with scales in the epilogue."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.quantized import FP8, Fp8Experts
from trimaran.kernels.tables.grouped_table import TritonCut
from trimaran.kernels.triton.byte_inputs import (
    Choices,
    as_fp8,
    quantize_choices,
    quantize_groups,
    quantize_tokens,
    scale_of,
)
from trimaran.kernels.triton.experts import (
    SortedAssignments,
    add_parts,
    find_tile,
    sort_assignments,
)
from trimaran.kernels.triton.launch import Launcher, num_tiles, padded_size

# Shapes: T tokens, D hidden size, X experts of this rank, C experts of a token, N = T C choices
# (token t's c-th choice is number t C + c), F inner width, E = 2 F, G groups of inputs; of
# scales: R rows and S columns of blocks.

_GROUP = 8
"""Tiles of rows that process the same columns at about the same time, for the cache."""

_MAX_COLUMNS = 128


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _read(pointers, is_inside, IS_EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values at these addresses; with ``IS_EVEN`` all of them are valid, else zero
    outside.
    """
    if IS_EVEN:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=is_inside, other=0.0)
    return values


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _step(  # type: ignore[no-untyped-def]
    total, lines, values, scales_at, of_rows, step, is_value, HAS_BLOCKS: tl.constexpr,
    IS_UNIFORM: tl.constexpr, STEP: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """``total`` [COLUMNS, ROWS] with one more step of ``STEP`` inputs."""
    line = _read(lines + step * STEP, is_value, IS_EVEN)
    if HAS_BLOCKS:
        of_columns = tl.load(scales_at + step)
        if IS_UNIFORM:
            total += tl.dot(line, values) * (of_columns * of_rows)[None, :]
        else:
            total += tl.dot(line, values) * (of_columns[:, None] * of_rows[None, :])
    else:
        # Hopper's own sums have 22 bits: they are added to float32 after every step.
        total = tl.dot(line, values, total, max_num_imprecise_acc=STEP)
    return total


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _scaled_sums(  # type: ignore[no-untyped-def]
    tokens, x_scales, is_row, lines, w_scales, block_rows, columns, INNER: tl.constexpr,
    UP: tl.constexpr, COLUMNS_OF_SCALES: tl.constexpr, HAS_BLOCKS: tl.constexpr,
    IS_UNIFORM: tl.constexpr, IS_GATED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """[COLUMNS, ROWS] twice: products of ``lines`` and, if gated, of lines ``UP`` rows below.

    ``x_scales`` points to the scales of each row.
    """
    scales_at, up_scales_at = w_scales + columns, w_scales + columns + UP
    if HAS_BLOCKS:
        # Uniform columns share the scales of the first of them.
        of_scale = tl.min(columns, 0) if IS_UNIFORM else columns
        scales_at = w_scales + tl.load(block_rows + of_scale) * COLUMNS_OF_SCALES
        if IS_GATED:
            up_scales_at = w_scales + tl.load(block_rows + UP + of_scale) * COLUMNS_OF_SCALES
    inner = tl.arange(0, STEP)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS], tl.float32)
    of_rows = tl.zeros([ROWS], tl.float32)
    NUM_STEPS: tl.constexpr = (INNER + STEP - 1) // STEP
    for step in range(NUM_STEPS):
        is_inner = inner + step * STEP < INNER
        values = _read(tokens + step * STEP, is_inner[:, None], IS_EVEN)
        if HAS_BLOCKS:
            of_rows = tl.load(x_scales + step, mask=is_row, other=0.0)
        total = _step(
            total, lines, values, scales_at, of_rows, step, is_inner[None, :], HAS_BLOCKS,
            IS_UNIFORM, STEP, IS_EVEN,
        )  # fmt: skip
        if IS_GATED:
            up = _step(
                up, lines + UP * INNER, values, up_scales_at, of_rows, step, is_inner[None, :],
                HAS_BLOCKS, IS_UNIFORM, STEP, IS_EVEN,
            )  # fmt: skip
    if not HAS_BLOCKS:
        of_rows = tl.load(x_scales, mask=is_row, other=0.0)
        total *= tl.load(scales_at)[:, None] * of_rows[None, :]
        if IS_GATED:
            up *= tl.load(up_scales_at)[:, None] * of_rows[None, :]
    return total, up


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _store(  # type: ignore[no-untyped-def]
    output, out_scales, like, total, target, column_tile, is_row, OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr, EMITS: tl.constexpr, HAS_POWERS: tl.constexpr,
):  # fmt: skip
    """Store a tile at the rows ``target``; with ``EMITS`` in FP8, with a scale for each row."""
    NUM_COLUMNS: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < OUTPUTS
    place = target[None, :] * OUTPUTS + columns[:, None]
    is_output = is_row[None, :] & is_column[:, None]
    if EMITS:
        # Rounded first, as without this fusion.
        total = total.to(like.dtype.element_ty).to(tl.float32)
        total = tl.where(is_column[:, None], total, 0.0)
        scale = scale_of(tl.max(tl.abs(total), 0), HAS_POWERS)
        tl.store(out_scales + target * NUM_COLUMNS + column_tile, scale, mask=is_row)
        tl.store(output + place, as_fp8(total, scale[None, :]), mask=is_output)
    else:
        tl.store(output + place, total.to(output.dtype.element_ty), mask=is_output)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _experts_kernel(  # type: ignore[no-untyped-def]
    x, x_scales, weight, w_scales, block_rows, output, out_scales, order, totals,
    routing_weights, like, INNER: tl.constexpr, OUTPUTS: tl.constexpr, SHARE: tl.constexpr,
    PADDED: tl.constexpr, SCALES: tl.constexpr, COLUMNS_OF_SCALES: tl.constexpr,
    HAS_BLOCKS: tl.constexpr, IS_UNIFORM: tl.constexpr, IS_GATED: tl.constexpr,
    EMITS: tl.constexpr, HAS_POWERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, GROUP: tl.constexpr, IS_EVEN: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes ``COLUMNS`` outputs of up to ``ROWS`` choices of one expert.

    ``IS_GATED``: SwiGLU of the choices' tokens, in the order by expert; choice n reads row
    ``n // SHARE``. Otherwise: products of rows in this order, times the choices' weights, each
    stored at its choice. With ``EMITS`` the columns of a program are a group of the next
    product's inputs, and the program stores them in FP8 with their scales, first rounded to
    the type of ``like``. An expert has ``SCALES`` scales. Programs behind the last tile, whose
    number is on the device only, end at once.
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
        source = assignments // SHARE if IS_GATED else tl.where(is_row, rows, 0)
        source = source.to(tl.int64)
        columns = within // height * COLUMNS + tl.arange(0, COLUMNS)
        # Columns beyond the end read the first of them, and are not stored.
        columns = tl.where(columns < OUTPUTS, columns, 0)
        inner = tl.arange(0, STEP)
        HEIGHT: tl.constexpr = OUTPUTS * 2 if IS_GATED else OUTPUTS
        lines = weight + (expert.to(tl.int64) * HEIGHT + columns)[:, None] * INNER + inner
        total, up = _scaled_sums(
            x + source[None, :] * INNER + inner[:, None], x_scales + source * COLUMNS_OF_SCALES,
            is_row, lines, w_scales + expert.to(tl.int64) * SCALES, block_rows, columns, INNER,
            OUTPUTS, COLUMNS_OF_SCALES, HAS_BLOCKS, IS_UNIFORM, IS_GATED, ROWS, COLUMNS, STEP,
            IS_EVEN,
        )  # fmt: skip
        if IS_GATED:
            total = total / (1.0 + tl.exp(-total)) * up
            target = rows.to(tl.int64)
        else:
            of_choices = tl.load(routing_weights + assignments, mask=is_row, other=0.0)
            total *= of_choices[None, :]
            target = assignments.to(tl.int64)
        _store(
            output, out_scales, like, total, target, within // height, is_row, OUTPUTS,
            COLUMNS, EMITS, HAS_POWERS,
        )  # fmt: skip


_multiply = Launcher(_experts_kernel)


class _Rows(NamedTuple):
    """Quantized rows of inputs."""

    values: Tensor
    """FP8 [rows, D]."""

    scales: Tensor
    """Float32 [rows], or [rows, G] with blocks."""


def likely_cut(average: int, columns: int = _MAX_COLUMNS) -> TritonCut:
    """The tile height close to an expert's ``average`` number of rows, from 16 to 128."""
    rows = min(max(padded_size(average), 16), 128)
    if rows <= 32:
        return TritonCut(rows, columns, 128, 4, 4)
    return TritonCut(rows, columns, 128, 8, 3)


def expert_mlp(
    x_TD: Tensor,
    weights_TC: Tensor,
    ids_TC: Tensor,
    gate_up: Fp8Experts,
    down: Fp8Experts,
    first_expert: int = 0,
    fixed_rows: int = 0,
) -> Tensor:
    """The weighted sum of each token's experts; see `Ops.fp8_expert_mlp`.

    Rows of ``x`` are contiguous. The host does not read the choices: grids depend on the number
    of tokens alone, so this is safe under CUDA graph capture. With ``fixed_rows``, the height
    of tiles for any number of tokens, a token's result does not depend on the other tokens.
    """
    num_experts, hidden, inner = down.values.shape
    num_choices = ids_TC.numel()
    if not num_choices:
        return torch.empty_like(x_TD)
    by_expert = sort_assignments(ids_TC, num_experts, first_expert)
    choices = Choices(ids_TC, first_expert, num_experts)
    x, share = _inputs(x_TD, gate_up, choices), 1
    if gate_up.inputs.scale is None:
        share = ids_TC.shape[1]
    cut = likely_cut(fixed_rows or num_tiles(num_choices, num_experts))
    emits = down.blocks is not None and down.blocks.size <= _MAX_COLUMNS
    dtype = FP8 if emits else x_TD.dtype
    device = x_TD.device
    inner_NF = torch.empty((num_choices, inner), dtype=dtype, device=device)
    groups = 0 if down.blocks is None else len(down.blocks.groups(inner))
    scales_NG = torch.empty((num_choices, groups), dtype=torch.float32, device=device)
    first = replace(cut, columns=down.blocks.size) if emits and down.blocks else cut
    powers = down.inputs.has_power_scales
    _product(
        first, by_expert, x, gate_up, (inner_NF, scales_NG, x_TD), weights_TC,
        (share, emits, powers),
    )  # fmt: skip
    rows = _Rows(inner_NF, scales_NG)
    if not emits:
        rows = _inputs(
            inner_NF, down, choices._replace(sorted_by=(by_expert.order, by_expert.totals))
        )
    parts_ND = torch.empty((num_choices, hidden), dtype=torch.float32, device=device)
    _product(
        cut,
        by_expert,
        rows,
        down,
        (parts_ND, parts_ND, parts_ND),
        weights_TC,
        (0, False, False),
    )
    return add_parts(parts_ND, ids_TC, num_experts, first_expert, x_TD)


def _inputs(x: Tensor, experts: Fp8Experts, choices: Choices) -> _Rows:
    """The rows of ``x`` in FP8: those of tokens, or of choices if these are sorted or have
    scales of experts."""
    if experts.blocks is not None:
        return _Rows(*quantize_groups(x, experts.blocks, experts.inputs))
    if experts.inputs.scale is None and choices.sorted_by is None:
        return _Rows(*quantize_tokens(x, experts.inputs))
    return _Rows(*quantize_choices(x, choices, experts.inputs))


def _product(
    cut: TritonCut,
    by_expert: SortedAssignments,
    x: _Rows,
    experts: Fp8Experts,
    targets: tuple[Tensor, Tensor, Tensor],
    weights_TC: Tensor,
    how: tuple[int, bool, bool],
) -> None:
    """One of the two grouped products, with the output, its scales and `like` as targets.

    ``how`` is the number of choices that share a row of ``x`` (0: rows are sorted, and the
    product is not gated), whether the output is FP8, and whether its scales are powers of two.
    """
    share, emits, has_powers = how
    output, out_scales, like = targets
    num_choices, outputs = output.shape
    num_experts, _, inner = experts.values.shape
    blocks, scales = experts.blocks, experts.scales
    step = cut.step if blocks is None else blocks.size
    is_uniform = blocks is not None and blocks.uniform % cut.columns == 0
    # The rows of up matrices follow those of gate matrices.
    is_uniform &= outputs % cut.columns == 0
    # Each expert with rows has at most one tile that is not full.
    tiles = num_choices // cut.rows + min(num_experts, num_choices)
    args = (
        x.values, x.scales, experts.values, scales,
        by_expert.order if blocks is None else blocks.rows, output, out_scales,
        by_expert.order, by_expert.totals, weights_TC, like,
    )  # fmt: skip
    constants = (
        inner, outputs, share or 1, padded_size(num_experts), scales[0].numel(),
        1 if blocks is None else scales.shape[2], blocks is not None, is_uniform, share > 0,
        emits,
        has_powers, cut.rows, cut.columns, step, _GROUP, inner % step == 0,
    )  # fmt: skip
    grid = (tiles * num_tiles(outputs, cut.columns), 1)
    _multiply(grid, args, constants, num_warps=cut.num_warps, num_stages=cut.num_stages)
