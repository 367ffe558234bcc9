"""Products of attention heads with a matrix each, on a GPU."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.triton.launch import Launcher, num_tiles, padded_size

# Shapes: T tokens, N heads, H dims of a head, D of them that are multiplied, E outputs.

_FEW, _MANY = 16, 128
"""Rows of a tile: for a step with few tokens, and for others."""

_COLUMNS, _STEP = 64, 64


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator,unused-ignore]
def _head_linear_kernel(  # type: ignore[no-untyped-def]
    x, weight, output, x_token_stride, x_head_stride, weight_head_stride, weight_row_stride,
    weight_column_stride, token_stride, head_stride, num_tokens, num_heads,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): i counts tiles of rows, and heads fastest; j tiles of outputs. The
    last j copies the dims that are not multiplied, if there are any.
    """
    head, column = tl.program_id(0) % num_heads, tl.program_id(1) * COLUMNS
    rows = tl.program_id(0) // num_heads * ROWS + tl.arange(0, ROWS)
    is_row = (rows < num_tokens)[:, None]
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    source = x + rows.to(tl.int64)[:, None] * x_token_stride + head * x_head_stride
    target = output + rows.to(tl.int64)[:, None] * token_stride + head * head_stride
    if REST > 0 and column >= OUTPUTS:
        rest = tl.arange(0, REST_PADDED)[None, :]
        is_rest = is_row & (rest < REST)
        tl.store(target + OUTPUTS + rest, tl.load(source + WIDTH + rest, mask=is_rest), is_rest)
        return
    columns, inner = column + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    matrix = weight + head.to(tl.int64) * weight_head_stride
    matrix += columns[None, :] * weight_row_stride
    is_column = (columns < OUTPUTS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, WIDTH, STEP):
        dims = first + inner
        is_dim = dims < WIDTH
        values = tl.load(source + dims[None, :], mask=is_row & is_dim[None, :], other=0.0)
        weights = tl.load(
            matrix + dims[:, None] * weight_column_stride,
            mask=is_column & is_dim[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot(values, weights, total, input_precision=PRECISION)
    result = total.to(output.dtype.element_ty)
    tl.store(target + columns[None, :], result, mask=is_row & is_column)


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
    rows = _FEW if tokens <= _FEW and not is_fixed else _MANY
    args = (
        x_TNH, weight_NED, output, *x_TNH.stride()[:2], *weight_NED.stride(),
        *output.stride()[:2], tokens, heads,
    )  # fmt: skip
    constants = (
        width, outputs, rest, padded_size(rest) if rest else 0, rows, _COLUMNS, _STEP,
        "ieee" if x_TNH.dtype is torch.float32 else "tf32",
    )  # fmt: skip
    grid = num_tiles(tokens, rows) * heads, num_tiles(outputs, _COLUMNS) + (rest > 0)
    _head_linear(grid, args, constants)
    return output
