"""Products of attention heads with a matrix each, on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.triton.launch import Launcher, num_tiles, padded_size
from trimaran.kernels.triton.skinny import prefetch

# Shapes: T tokens, N heads, H dims of a head, D of them that are multiplied, E outputs.

_FEW, _MANY = 16, 128
"""Rows of a tile: for a step with few tokens, and for others."""

_COLUMNS, _STEP = 64, 64
_FEW_COLUMNS, _FEW_STEP = 16, 128
"""The same for a step with few tokens, so that all multiprocessors read matrices."""

_LINE = 64
"""Values of a cache line."""


class HeadTile(NamedTuple):
    """Tile shape of the products of heads."""

    rows: int
    columns: int
    step: int
    lines: int
    """Cache lines of a row of a matrix to request before vectors are ready."""

    @classmethod
    def of(cls, num_tokens: int, weight_NED: Tensor, *, is_fixed: bool = False) -> HeadTile:
        """The tile for a number of tokens; with ``is_fixed`` the same for any number."""
        if num_tokens > _FEW or is_fixed:
            return cls(_MANY, _COLUMNS, _STEP, 0)
        width, stride = weight_NED.shape[2], weight_NED.stride(2)
        is_whole = stride == 1 and width % _LINE == 0 and width == padded_size(width)
        return cls(_FEW, _FEW_COLUMNS, _FEW_STEP, width // _LINE if is_whole else 0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def request_matrix(  # type: ignore[no-untyped-def]
    matrix, columns, row_stride, OUTPUTS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Prefetch these rows of a head's matrix."""
    if LINES > 0:
        lines = tl.minimum(columns, OUTPUTS - 1)[:, None] * row_stride
        prefetch(matrix + lines + 64 * tl.arange(0, LINES)[None, :])


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def multiply_head(  # type: ignore[no-untyped-def]
    source, matrix, target, is_row, columns, row_stride, column_stride, WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the products of rows of vectors, at ``source`` [ROWS, 1], with some rows of a
    head's matrix at ``target``.
    """
    inner = tl.arange(0, STEP)
    is_column = (columns < OUTPUTS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, WIDTH, STEP):
        dims = first + inner
        is_dim = dims < WIDTH
        values = tl.load(source + dims[None, :], mask=is_row & is_dim[None, :], other=0.0)
        weights = tl.load(
            matrix + columns[None, :] * row_stride + dims[:, None] * column_stride,
            mask=is_column & is_dim[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot(values, weights, total, input_precision=PRECISION)
    result = total.to(target.dtype.element_ty)
    tl.store(target + columns[None, :], result, mask=is_row & is_column)


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator,unused-ignore]
def _head_linear_kernel(  # type: ignore[no-untyped-def]
    x, weight, output, x_token_stride, x_head_stride, weight_head_stride, weight_row_stride,
    weight_column_stride, token_stride, head_stride, num_tokens, num_heads,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, LINES: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): i counts tiles of rows, and heads fastest; j tiles of outputs. The
    last j copies the dims that are not multiplied, if there are any.
    """
    head, column = tl.program_id(0) % num_heads, tl.program_id(1) * COLUMNS
    rows = tl.program_id(0) // num_heads * ROWS + tl.arange(0, ROWS)
    is_row = (rows < num_tokens)[:, None]
    columns = column + tl.arange(0, COLUMNS)
    matrix = weight + head.to(tl.int64) * weight_head_stride
    if OVERLAPS:
        gdc_launch_dependents()
        request_matrix(matrix, columns, weight_row_stride, OUTPUTS, LINES)
        gdc_wait()
    source = x + rows.to(tl.int64)[:, None] * x_token_stride + head * x_head_stride
    target = output + rows.to(tl.int64)[:, None] * token_stride + head * head_stride
    if REST > 0 and column >= OUTPUTS:
        rest = tl.arange(0, REST_PADDED)[None, :]
        is_rest = is_row & (rest < REST)
        tl.store(target + OUTPUTS + rest, tl.load(source + WIDTH + rest, mask=is_rest), is_rest)
        return
    multiply_head(
        source, matrix, target, is_row, columns, weight_row_stride, weight_column_stride, WIDTH,
        OUTPUTS, ROWS, COLUMNS, STEP, PRECISION,
    )  # fmt: skip


_head_linear = Launcher(_head_linear_kernel)


def head_linear(x_TNH: Tensor, weight_NED: Tensor, *, is_fixed: bool = False) -> Tensor:
    """The first D dims of each head times the head's own matrix, and the other dims behind
    the product: [T, N, E + H - D].

    ``x`` may have any strides but 1 in its last dim (0 for heads: all have the same vectors),
    ``weight`` any. With ``is_fixed`` a token's result does not depend on the number of
    tokens. Safe under CUDA graph capture.
    """
    tokens, heads, size = x_TNH.shape
    outputs, width = weight_NED.shape[1:]
    rest = size - width
    output = torch.empty(
        (tokens, heads, outputs + rest), dtype=x_TNH.dtype, device=x_TNH.device
    )
    tile = HeadTile.of(tokens, weight_NED, is_fixed=is_fixed)
    args = (
        x_TNH, weight_NED, output, *x_TNH.stride()[:2], *weight_NED.stride(),
        *output.stride()[:2], tokens, heads,
    )  # fmt: skip
    constants = (
        width, outputs, rest, padded_size(rest) if rest else 0, *tile,
        "ieee" if x_TNH.dtype is torch.float32 else "tf32",
    )  # fmt: skip
    num_columns = num_tiles(outputs, tile.columns) + (rest > 0)
    grid = num_tiles(tokens, tile.rows) * heads, num_columns
    _head_linear(grid, args, constants)
    return output
