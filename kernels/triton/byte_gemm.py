"""Products in FP8 or INT8 on a GPU: many rows in tiles, and few rows while the weight streams
by. Sums of INT8 are exact integers until they are scaled."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.quantized import ByteWeight
from trimaran.kernels.triton.launch import Launcher, num_tiles
from trimaran.kernels.triton.skinny import prefetch

# Shapes: T tokens, D inner width, E outputs, G groups of inputs; of scales: R rows and C
# columns of blocks.

MAX_STREAM_ROWS = 64
"""Rows up to which the weight streams by."""

_MAX_TILES = 1 << 16


class Tile(NamedTuple):
    """How a product is cut."""

    rows: int
    """Rows of a program, a power of two from 16 on."""

    columns: int
    """Outputs of a program."""

    step: int
    """Inputs of a step; with blocks their size counts instead."""

    parts: int = 1
    """Programs that share the inner width of a tile. The last one adds up their sums."""

    warps: int = 4
    stages: int = 4
    ahead: int = 4
    """Lines of 128 weights of each output that are prefetched before the inputs are ready."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _added(a, b, total, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """``total + a @ b`` of a step."""
    if a.dtype == tl.int8:
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    else:
        # Hopper's own sums have 22 bits: they are added to float32 after every step.
        total = tl.dot(a, b, total, max_num_imprecise_acc=STEP)
    return total


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _times(total, first, second):  # type: ignore[no-untyped-def]
    """Sums times two scales, which broadcast to them."""
    if total.dtype == tl.int32:
        # As the kernels in CUDA C++ do: all kernels' results are equal to the bit.
        return total.to(tl.float32) * (first * second)
    else:
        return total * first * second


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _read_step(  # type: ignore[no-untyped-def]
    tokens, lines, step, INNER: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr
):
    """The inputs [ROWS, STEP] and weights [STEP, COLUMNS] of a step, zero outside."""
    IS_EVEN: tl.constexpr = FIRST == 0 and INNER % STEP == 0
    if IS_EVEN:
        values = tl.load(tokens + step * STEP)
        line = tl.load(lines + step * STEP)
    else:
        dims = step * STEP - FIRST + tl.arange(0, STEP)
        is_dim = (dims >= 0) & (dims < INNER)
        values = tl.load(tokens + step * STEP, mask=is_dim[None, :], other=0.0)
        line = tl.load(lines + step * STEP, mask=is_dim[:, None], other=0.0)
    return values, line


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator,unused-ignore]
def _tile_kernel(  # type: ignore[no-untyped-def]
    x, weight, x_scales, w_scales, block_rows, bias, output, num_rows, x_stride, num_outputs,
    INNER: tl.constexpr, FIRST: tl.constexpr, COLUMNS_OF_SCALES: tl.constexpr,
    HAS_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, IS_UNIFORM: tl.constexpr,
    TOGETHER: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes a tile of ``ROWS`` x ``COLUMNS`` outputs.

    ``IS_UNIFORM``: the columns of a tile have one scale a block of inputs. ``TOGETHER``
    tiles of rows share the columns that they read from the L2 cache.
    """
    program = tl.program_id(0)
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    num_column_tiles = tl.cdiv(num_outputs, COLUMNS)
    band = program // (TOGETHER * num_column_tiles)
    in_band = min(num_row_tiles - band * TOGETHER, TOGETHER)
    place = program % (TOGETHER * num_column_tiles)
    rows = (band * TOGETHER + place % in_band) * ROWS + tl.arange(0, ROWS)
    columns = place // in_band * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows, columns < num_outputs
    # Rows and columns beyond the end read those at the beginning, and store nothing.
    safe_rows = tl.where(is_row, rows, 0).to(tl.int64)
    safe_columns = tl.where(is_column, columns, 0).to(tl.int64)
    inner = tl.arange(0, STEP)
    tokens = x + safe_rows[:, None] * x_stride + inner[None, :] - FIRST
    lines = weight + safe_columns[None, :] * INNER + inner[:, None] - FIRST
    if OVERLAPS:
        gdc_launch_dependents()
    scales_at = w_scales + safe_columns
    if HAS_BLOCKS:
        scaled = place // in_band * COLUMNS if IS_UNIFORM else safe_columns
        scales_at = w_scales + tl.load(block_rows + scaled) * COLUMNS_OF_SCALES
    if OVERLAPS:
        gdc_wait()
    NUM_STEPS: tl.constexpr = (INNER + FIRST + STEP - 1) // STEP
    SUM: tl.constexpr = tl.int32 if weight.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros([ROWS, COLUMNS], SUM)
    for step in range(NUM_STEPS):
        values, line = _read_step(tokens, lines, step, INNER, FIRST, STEP)
        if HAS_BLOCKS:
            of_rows = tl.load(x_scales + safe_rows * COLUMNS_OF_SCALES + step)
            of_columns = tl.load(scales_at + step)
            if IS_UNIFORM:
                # One operation for each sum instead of three, while the matrix units wait.
                total += tl.dot(values, line) * (of_rows * of_columns)[:, None]
            else:
                total += tl.dot(values, line) * of_rows[:, None] * of_columns[None, :]
        else:
            total = _added(values, line, total, STEP)
    scaled = total
    if not HAS_BLOCKS:
        of_rows, of_columns = tl.load(x_scales + safe_rows), tl.load(scales_at)
        scaled = _times(total, of_rows[:, None], of_columns[None, :])
    if HAS_BIAS:
        scaled += tl.load(bias + safe_columns).to(tl.float32)[None, :]
    target = output + safe_rows[:, None] * num_outputs + columns[None, :]
    tl.store(target, scaled.to(output.dtype.element_ty), mask=is_row[:, None] & is_column)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _scaled(  # type: ignore[no-untyped-def]
    total, x_scales, w_scales, bias, rows, is_row, columns, is_column,
    HAS_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """[COLUMNS, ROWS] sums times their scales, plus the bias."""
    scaled = total
    if not HAS_BLOCKS:
        of_rows = tl.load(x_scales + rows, mask=is_row, other=0.0)
        of_columns = tl.load(w_scales + columns, mask=is_column, other=0.0)
        scaled = _times(total, of_rows[None, :], of_columns[:, None])
    if HAS_BIAS:
        values = tl.load(bias + columns, mask=is_column, other=0.0)
        scaled += values.to(tl.float32)[:, None]
    return scaled


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sums(  # type: ignore[no-untyped-def]
    tokens, is_row, lines, x_scales, w_scales, begin, end, INNER: tl.constexpr,
    FIRST: tl.constexpr, HAS_BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """[COLUMNS, ROWS]: the sums of the steps from ``begin`` to ``end``; with blocks times their
    scales."""
    IS_EVEN: tl.constexpr = FIRST == 0 and INNER % STEP == 0
    inner = tl.arange(0, STEP)
    SUM: tl.constexpr = tl.int32 if lines.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros([COLUMNS, ROWS], SUM)
    for step in range(begin, end):
        if IS_EVEN:
            line = tl.load(lines + step * STEP)
            values = tl.load(tokens + step * STEP, mask=is_row[None, :], other=0.0)
        else:
            dims = step * STEP - FIRST + inner
            is_dim = (dims >= 0) & (dims < INNER)
            line = tl.load(lines + step * STEP, mask=is_dim[None, :], other=0.0)
            is_value = is_dim[:, None] & is_row[None, :]
            values = tl.load(tokens + step * STEP, mask=is_value, other=0.0)
        if HAS_BLOCKS:
            of_rows, of_columns = tl.load(x_scales + step), tl.load(w_scales + step)
            total += tl.dot(line, values) * of_rows[None, :] * of_columns[:, None]
        else:
            total = _added(line, values, total, STEP)
    return total


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator,unused-ignore]
def _stream_kernel(  # type: ignore[no-untyped-def]
    x, weight, x_scales, w_scales, block_rows, bias, output, sums, counters, num_rows,
    x_stride, num_outputs, INNER: tl.constexpr, FIRST: tl.constexpr,
    COLUMNS_OF_SCALES: tl.constexpr, HAS_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr,
    AHEAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (e, s) adds up the s-th part of D for the e-th ``COLUMNS`` outputs of all rows.

    The programs of a tile leave their sums in ``sums``; the program that ends last, by the
    tile's counter, adds up the sums in order and leaves the counter at zero.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    columns, rows = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    is_column, is_row = columns < num_outputs, rows < num_rows
    safe_columns = tl.where(is_column, columns, 0).to(tl.int64)
    safe_rows = tl.where(is_row, rows, 0).to(tl.int64)
    inner = tl.arange(0, STEP)
    lines = weight + safe_columns[:, None] * INNER + inner[None, :] - FIRST
    tokens = x + safe_rows[None, :] * x_stride + inner[:, None] - FIRST
    NUM_STEPS: tl.constexpr = (INNER + FIRST + STEP - 1) // STEP
    SHARE: tl.constexpr = (NUM_STEPS + PARTS - 1) // PARTS
    if OVERLAPS:
        gdc_launch_dependents()
        first_line = weight + safe_columns[:, None] * INNER + part * SHARE * STEP
        prefetch(first_line + 128 * tl.arange(0, AHEAD)[None, :])
    of_columns = w_scales + safe_columns
    if HAS_BLOCKS:
        of_columns = w_scales + tl.load(block_rows + safe_columns) * COLUMNS_OF_SCALES
    if OVERLAPS:
        gdc_wait()
    total = _sums(
        tokens, is_row, lines, x_scales + safe_rows * COLUMNS_OF_SCALES, of_columns,
        part * SHARE, min(part * SHARE + SHARE, NUM_STEPS), INNER, FIRST, HAS_BLOCKS, ROWS,
        COLUMNS, STEP,
    )  # fmt: skip
    is_last = True
    if PARTS > 1:
        place = tl.arange(0, COLUMNS)[:, None] * ROWS + rows[None, :]
        mine = sums + tile * PARTS * COLUMNS * ROWS + place
        tl.store(mine + part * COLUMNS * ROWS, total)
        # All threads' sums must be visible before the count that announces them.
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == PARTS - 1
        if is_last:
            total = tl.zeros([COLUMNS, ROWS], total.dtype)
            for other in range(PARTS):
                # Bypasses the L1 cache, which does not see writes of other programs.
                total += tl.load(mine + other * COLUMNS * ROWS, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if is_last:
        scaled = _scaled(
            total, x_scales, w_scales, bias, rows, is_row, columns, is_column, HAS_BLOCKS,
            HAS_BIAS,
        )  # fmt: skip
        target = output + safe_rows[None, :] * num_outputs + columns[:, None]
        is_output = is_column[:, None] & is_row[None, :]
        tl.store(target, scaled.to(output.dtype.element_ty), mask=is_output)


_tiles = Launcher(_tile_kernel)
_stream = Launcher(_stream_kernel)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Zeros between kernels: one counter for each tile of outputs. Products of one device run
    one after another, so that they share them."""
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


class Inputs(NamedTuple):
    """Quantized inputs of a product."""

    values: Tensor
    """FP8 or INT8 [T, D] with contiguous rows."""

    scales: Tensor
    """Float32 [T], or [T, G] with blocks."""


def multiply_tiles(
    x: Inputs, weight: ByteWeight, bias_E: Tensor | None, dtype: torch.dtype, tile: Tile
) -> Tensor:
    """``x @ weight.T + bias`` [T, E], rounded once to ``dtype``.

    A row's result depends neither on the other rows nor on their number. With blocks their
    size is a power of two from 32 on. Safe under CUDA graph capture.
    """
    rows, outputs = x.values.shape[0], weight.values.shape[0]
    output_TE = torch.empty((rows, outputs), dtype=dtype, device=x.values.device)
    together = 8
    args = (*_operands(x, weight, bias_E), output_TE, rows, x.values.stride(0), outputs)
    constants = (*_constants(weight, bias_E), tile.rows, tile.columns, _step(weight, tile))
    blocks = weight.blocks
    is_uniform = blocks is not None and blocks.uniform % tile.columns == 0
    grid = (num_tiles(rows, tile.rows) * num_tiles(outputs, tile.columns), 1)
    if rows:
        _tiles(grid, args, (*constants, is_uniform, together), tile.warps, tile.stages)
    return output_TE


def multiply_stream(
    x: Inputs, weight: ByteWeight, bias_E: Tensor | None, dtype: torch.dtype, tile: Tile
) -> Tensor:
    """Like `multiply_tiles`, for at most ``tile.rows`` rows; products of one device must not
    run at the same time."""
    rows, outputs = x.values.shape[0], weight.values.shape[0]
    device = x.values.device
    output_TE = torch.empty((rows, outputs), dtype=dtype, device=device)
    count = num_tiles(outputs, tile.columns)
    assert rows <= tile.rows and count <= _MAX_TILES
    size = count * tile.parts * tile.columns * tile.rows if tile.parts > 1 else 0
    is_integer = weight.values.dtype == torch.int8
    sums = torch.empty(size, dtype=torch.int32 if is_integer else torch.float32, device=device)
    args = (
        *_operands(x, weight, bias_E), output_TE, sums, _counters(device), rows,
        x.values.stride(0), outputs,
    )  # fmt: skip
    cut = (tile.rows, tile.columns, _step(weight, tile), tile.parts, tile.ahead)
    constants = (*_constants(weight, bias_E), *cut)
    if rows:
        _stream((count, tile.parts), args, constants, tile.warps, tile.stages)
    return output_TE


def _operands(x: Inputs, weight: ByteWeight, bias_E: Tensor | None) -> tuple[Tensor, ...]:
    scales = weight.scales
    rows = scales if weight.blocks is None else weight.blocks.rows
    # An unread tensor replaces an absent tensor.
    bias = scales if bias_E is None else bias_E
    return x.values, weight.values, x.scales, scales, rows, bias


def _constants(weight: ByteWeight, bias_E: Tensor | None) -> tuple[int, int, int, bool, bool]:
    blocks, inner = weight.blocks, weight.values.shape[1]
    if blocks is None:
        return inner, 0, 1, False, bias_E is not None
    return inner, blocks.first, weight.scales.shape[1], True, bias_E is not None


def _step(weight: ByteWeight, tile: Tile) -> int:
    return tile.step if weight.blocks is None else weight.blocks.size
