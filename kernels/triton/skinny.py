"""Products of at most 16 rows on a GPU: the weight is read once, and prefetched early."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.triton.launch import Launcher, padded_size

# Shapes: T tokens, D inner width, E outputs, F = E / 2 with gate and up, S parts.

MAX_ROWS = 16
"""The row count of the matrix units; fewer rows are padded to it."""

MAX_DOT_ROWS = 2
"""Limit for a router: every row reads the whole weight."""

MIN_BYTES = 16 << 20
"""A smaller weight is read in less time than launches take."""

_COLUMNS, _STEP, _PARTS, _AHEAD = 64, 128, 2, 4
_GATED_COLUMNS, _GATED_STEP, _GATED_AHEAD = 64, 128, 2


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def prefetch(places):  # type: ignore[no-untyped-def]
    """Prefetch the cache lines at these addresses without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator,unused-ignore]
def _skinny_kernel(  # type: ignore[no-untyped-def]
    x, weight, output, x_stride, num_rows, part_stride, row_stride, INNER: tl.constexpr,
    OUTPUTS: tl.constexpr, PARTS: tl.constexpr, IS_GATED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, AHEAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (i, s) computes the i-th ``COLUMNS`` outputs of all rows from the s-th part of D.

    Before the rows are ready it prefetches the first ``AHEAD`` lines of each weight row.
    """
    SHARE: tl.constexpr = INNER // PARTS
    part = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = part * SHARE + tl.arange(0, STEP)
    rows = tl.arange(0, ROWS)
    line = weight + columns.to(tl.int64)[:, None] * INNER
    source = line + inner[None, :]
    if OVERLAPS:
        gdc_launch_dependents()
        # A cache line holds 64 values.
        ahead = line + part * SHARE + 64 * tl.arange(0, AHEAD)[None, :]
        prefetch(ahead)
        if IS_GATED:
            prefetch(ahead + OUTPUTS * INNER)
        gdc_wait()
    tokens = x + rows[None, :] * x_stride + inner[:, None]
    is_row = (rows < num_rows)[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS], tl.float32)
    for first in range(0, SHARE, STEP):
        values = tl.load(tokens + first, mask=is_row, other=0.0)
        total = tl.dot(tl.load(source + first), values, total)
        if IS_GATED:
            up = tl.dot(tl.load(source + OUTPUTS * INNER + first), values, up)
    if IS_GATED:
        total = total / (1.0 + tl.exp(-total)) * up
    place = output + part * part_stride + rows[None, :] * row_stride + columns[:, None]
    tl.store(place, total.to(output.dtype.element_ty), mask=is_row)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _dots_kernel(  # type: ignore[no-untyped-def]
    x, weight, output, x_stride, OUTPUTS: tl.constexpr, INNER: tl.constexpr,
    PADDED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (t, e) computes the e-th output of row t, reading row and weight once."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inner = tl.arange(0, PADDED)
    is_inner = inner < INNER
    if OVERLAPS:
        gdc_launch_dependents()
    line = tl.load(weight + column * INNER + inner, mask=is_inner, other=0.0)
    if OVERLAPS:
        gdc_wait()
    values = tl.load(x + row * x_stride + inner, mask=is_inner, other=0.0)
    total = tl.sum(values.to(tl.float32) * line.to(tl.float32), axis=0)
    tl.store(output + row * OUTPUTS + column, total)


_skinny = Launcher(_skinny_kernel)
_dots = Launcher(_dots_kernel)


def can_stream(num_rows: int, weight_ED: Tensor, *, is_gated: bool) -> bool:
    """Whether a product of a number of rows with a weight is supported here, and faster than
    torch.

    Measured on an H200 against cuBLAS in a CUDA graph behind a norm, 8B shape, 1 and 16 rows:
    output projection in parts 10.4 and 10.9 us against 14.6 and 14.9, down projection 29.6 and
    31.3 against 33.2 and 35.8, gate and up with SwiGLU 59.7 and 57.9 against 61.2 and 68.6. Our
    Hopper kernel is still faster once its tile shapes are measured: a layer's products and
    norms of one row take 107.0 us, with these kernels 109.9.
    """
    outputs, inner = weight_ED.shape
    columns, step = _COLUMNS, _STEP * _PARTS
    if is_gated:
        columns, step = 2 * _GATED_COLUMNS, _GATED_STEP
    is_large = weight_ED.nbytes >= MIN_BYTES
    return num_rows <= MAX_ROWS and is_large and not (outputs % columns or inner % step)


def stream_parts(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Float32 [S, T, E] whose sum over S is ``x @ weight.T``.

    bf16 or float16, ``x`` with contiguous rows, the weight contiguous, shapes that `can_stream`
    allows. Safe under CUDA graph capture.
    """
    (rows, inner), outputs = x_TD.shape, weight_ED.shape[0]
    shape = (_PARTS, rows, outputs)
    output = torch.empty(shape, dtype=torch.float32, device=x_TD.device)
    args = (x_TD, weight_ED, output, x_TD.stride(0), rows, rows * outputs, outputs)
    constants = (inner, outputs, _PARTS, False, MAX_ROWS, _COLUMNS, _STEP, _AHEAD)
    _skinny((outputs // _COLUMNS, _PARTS), args, constants, num_stages=8)
    return output


def stream_gated(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` [T, F], gate rows above up rows; as `stream_parts`."""
    (rows, inner), outputs = x_TD.shape, weight_ED.shape[0] // 2
    output = torch.empty((rows, outputs), dtype=x_TD.dtype, device=x_TD.device)
    args = (x_TD, weight_ED, output, x_TD.stride(0), rows, 0, outputs)
    constants = (inner, outputs, 1, True, MAX_ROWS, _GATED_COLUMNS, _GATED_STEP, _GATED_AHEAD)
    _skinny((outputs // _GATED_COLUMNS, 1), args, constants, num_stages=3)
    return output


def row_products(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """``x @ weight.T`` as float32 [T, E], for a router's few outputs and at most `MAX_DOT_ROWS`
    rows.

    ``x`` with contiguous rows, the weight contiguous. Safe under CUDA graph capture.
    """
    rows, (outputs, inner) = x_TD.shape[0], weight_ED.shape
    output = torch.empty((rows, outputs), dtype=torch.float32, device=x_TD.device)
    args = (x_TD, weight_ED, output, x_TD.stride(0))
    _dots((rows, outputs), args, (outputs, inner, padded_size(inner)))
    return output
