"""Products by integer weights on a GPU, dequantized in registers on the way to matrix units."""

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

from trimaran.kernels.triton.launch import Launcher, num_tiles

# Shapes: T tokens, E outputs, K columns (inputs and padding), S steps of columns, G groups.

_MAX_TILES = 1 << 16


class Steps(NamedTuple):
    """A weight in the order of the kernel: ``step`` columns at a time share a scale."""

    values: Tensor
    """uint8 [E, K], or for 4 bits [E, K / 2]: byte j of a step holds its column j in the low
    half, and the column half a step further in the high half."""

    scales: Tensor
    """[G, E]."""

    zeros: Tensor | None
    """int16 [G, E]; None without minimums: half of the range."""

    minimums: Tensor | None
    """[G, E], in the dtype of the scales."""

    groups: Tensor
    """int32 [S]: the group of each step."""

    step: int
    bits: int
    is_fp4: bool = False


class Cut(NamedTuple):
    """How a product is cut."""

    rows: int
    """Rows of a program, a power of two from 16 on."""

    columns: int
    """Outputs of a program."""

    parts: int = 1
    """Programs that share the steps of a tile. The last one adds up their sums."""

    warps: int = 4
    stages: int = 4


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def integer_floats(words, zeros, BITS: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Integers less their zeros, exact in ``DTYPE``; ``zeros`` are int16 [E, 1]."""
    if tl.float16 == DTYPE:
        # The bits of 1024 plus an integer.
        floats = (words.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        return floats - (zeros + 1024).to(tl.float16)
    if tl.bfloat16 == DTYPE and BITS == 4:
        # The bits of 128 plus an integer of 4 bits.
        floats = (words.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        return floats - (zeros + 128).to(tl.bfloat16)
    return (words.to(tl.int16) - zeros).to(tl.float32).to(DTYPE)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def fp4_floats(codes, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers of FP4 codes (`integers.FP4_NUMBERS`), exact in ``DTYPE``."""
    bits = codes.to(tl.int16)
    sign = (bits & 8) << 12
    if tl.bfloat16 == DTYPE:
        # The code's exponent and mantissa stand at the place of the float's, whose exponent is
        # too small by the difference of biases; code 1 is a subnormal number on both sides.
        floats = (sign | (bits & 7) << 6).to(tl.bfloat16, bitcast=True)
        return floats * tl.full([], 8.507059173023462e37, tl.bfloat16)
    floats = (sign | (bits & 7) << 9).to(tl.float16, bitcast=True)
    floats = floats * tl.full([], 16384.0, tl.float16)
    return floats.to(DTYPE)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def weight_floats(codes, zeros, IS_FP4: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What codes of 4 bits stand for, before their scale."""
    if IS_FP4:
        floats = fp4_floats(codes, DTYPE)
    else:
        floats = integer_floats(codes, zeros, 4, DTYPE)
    return floats


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def scale_floats(scales):  # type: ignore[no-untyped-def]
    """Scales in float32, of floats or of the exponents of powers of two."""
    if scales.dtype == tl.uint8:
        floats = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        floats = scales.to(tl.float32)
    return floats


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sums(  # type: ignore[no-untyped-def]
    tokens, lines, scales, zeros, minimums, groups, begin, end, num_outputs, is_column,
    BITS: tl.constexpr, STEP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr, IS_FP4: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """[COLUMNS, ROWS]: the sums of the steps from ``begin`` to ``end``."""
    DTYPE: tl.constexpr = tokens.dtype.element_ty
    BYTES: tl.constexpr = STEP * BITS // 8
    HALF: tl.constexpr = 1 << (BITS - 1)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in range(begin, end):
        words = tl.load(lines + step * BYTES)
        group = tl.load(groups + step).to(tl.int64) * num_outputs
        scale = tl.load(scales + group, mask=is_column, other=0.0).to(tl.float32)
        zero = tl.full([COLUMNS, 1], 0 if HAS_MINIMUMS else HALF, tl.int16)
        if HAS_ZEROS:
            zero = tl.load(zeros + group, mask=is_column, other=0)[:, None]
        first = tl.load(tokens + step * STEP)
        if BITS == 4:
            second = tl.load(tokens + step * STEP + BYTES)
            low = weight_floats(words & 15, zero, IS_FP4, DTYPE)
            part = tl.dot(low, first, input_precision="ieee")
            high = weight_floats(words >> 4, zero, IS_FP4, DTYPE)
            part = tl.dot(high, second, part, input_precision="ieee")
        else:
            part = tl.dot(integer_floats(words, zero, 8, DTYPE), first, input_precision="ieee")
        total += part * scale[:, None]
        if HAS_MINIMUMS:
            least = tl.load(minimums + group, mask=is_column, other=0.0).to(tl.float32)
            sums = tl.sum(first.to(tl.float32), 0)
            if BITS == 4:
                sums += tl.sum(second.to(tl.float32), 0)
            total += least[:, None] * sums[None, :]
    return total


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator,unused-ignore]
def _product_kernel(  # type: ignore[no-untyped-def]
    x, values, scales, zeros, minimums, groups, bias, output, sums, counters, num_rows,
    x_stride, num_outputs, NUM_STEPS: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, IS_FP4: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (t, s) adds up the s-th part of the steps for tile t of ``COLUMNS`` outputs and
    ``ROWS`` rows; tiles of the same outputs lie one after another.

    The programs of a tile leave their sums in ``sums``; the program that ends last, by the
    tile's counter, adds up the sums in order and leaves the counter at zero.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    columns = tile // num_row_tiles * COLUMNS + tl.arange(0, COLUMNS)
    rows = tile % num_row_tiles * ROWS + tl.arange(0, ROWS)
    is_column, is_row = columns < num_outputs, rows < num_rows
    # Rows and columns beyond the end read those at the beginning, and store nothing.
    safe_columns = tl.where(is_column, columns, 0).to(tl.int64)
    safe_rows = tl.where(is_row, rows, 0).to(tl.int64)
    BYTES: tl.constexpr = STEP * BITS // 8
    inner = tl.arange(0, BYTES)
    lines = values + safe_columns[:, None] * (NUM_STEPS * BYTES) + inner[None, :]
    tokens = x + safe_rows[None, :] * x_stride + inner[:, None]
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    SHARE: tl.constexpr = (NUM_STEPS + PARTS - 1) // PARTS
    total = _sums(
        tokens, lines, scales + columns, zeros + columns, minimums + columns, groups,
        part * SHARE, min(part * SHARE + SHARE, NUM_STEPS), num_outputs, is_column, BITS, STEP,
        HAS_ZEROS, HAS_MINIMUMS, IS_FP4, ROWS, COLUMNS,
    )  # fmt: skip
    is_last = True
    if PARTS > 1:
        place = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        mine = sums + tile.to(tl.int64) * (PARTS * COLUMNS * ROWS) + place
        tl.store(mine + part * COLUMNS * ROWS, total)
        # All threads' sums must be visible before the count that announces them.
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == PARTS - 1
        if is_last:
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
            for other in range(PARTS):
                # Bypasses the L1 cache, which does not see writes of other programs.
                total += tl.load(mine + other * COLUMNS * ROWS, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if is_last:
        if HAS_BIAS:
            added = tl.load(bias + columns, mask=is_column, other=0.0)
            total += added.to(tl.float32)[:, None]
        target = output + safe_rows[None, :] * num_outputs + columns[:, None]
        is_output = is_column[:, None] & is_row[None, :]
        tl.store(target, total.to(output.dtype.element_ty), mask=is_output)


_product = Launcher(_product_kernel)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Zeros between kernels: one counter for each tile. Products of one device run one after
    another, so that they share them."""
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def multiply(
    x_TK: Tensor, weight: Steps, bias_E: Tensor | None, dtype: torch.dtype, cut: Cut
) -> Tensor:
    """``x @ weight.T + bias`` [T, E], rounded once to ``dtype``.

    A row's result depends neither on the other rows nor, for one cut, on their number. Safe
    under CUDA graph capture; products of one device must not run at the same time.
    """
    rows, outputs = x_TK.shape[0], weight.values.shape[0]
    output_TE = torch.empty((rows, outputs), dtype=dtype, device=x_TK.device)
    if not rows:
        return output_TE
    count = num_tiles(outputs, cut.columns) * num_tiles(rows, cut.rows)
    size = 0
    if cut.parts > 1:
        assert count <= _MAX_TILES
        size = count * cut.parts * cut.columns * cut.rows
    sums = torch.empty(size, dtype=torch.float32, device=x_TK.device)
    # An unread tensor replaces an absent tensor.
    scales = weight.scales
    args = (
        x_TK, weight.values, scales, scales if weight.zeros is None else weight.zeros,
        scales if weight.minimums is None else weight.minimums, weight.groups,
        scales if bias_E is None else bias_E, output_TE, sums, _counters(x_TK.device), rows,
        x_TK.stride(0), outputs,
    )  # fmt: skip
    constants = (
        weight.groups.shape[0], weight.step, weight.bits, weight.zeros is not None,
        weight.minimums is not None, weight.is_fp4, bias_E is not None, cut.rows, cut.columns,
        cut.parts,
    )  # fmt: skip
    _product((count, cut.parts), args, constants, cut.warps, cut.stages)
    return output_TE
