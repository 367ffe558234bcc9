"""Normalisation on a GPU, a row at a time, with the residual's addition fused in."""

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

# Shapes: T tokens, D width, A all heads of a token's product, H head size.

_RESIDENT_WARPS = 132 * 64
"""Warps that the largest GPU runs at once."""

_MANY_TURNS = 3
"""Rows for each program from which programs take several: loading a row while another is
normalised hides its latency. 8,192 rows of 4,096 take 40 us on an H200, instead of 59 with
one row a program.
"""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def added(value, held, place, is_dim):  # type: ignore[no-untyped-def]
    """Add ``value`` into the residual; returns the sum, rounded as stored."""
    rounded = (value + held.to(tl.float32)).to(held.dtype)
    tl.store(place, rounded, mask=is_dim)
    return rounded.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _put_normalised(  # type: ignore[no-untyped-def]
    value, scale, bias, output, row, dims, is_dim, width, eps, IS_CENTRED: tl.constexpr,
):  # fmt: skip
    """Normalise a row in float32; its sums do not depend on the other rows."""
    if IS_CENTRED:
        mean = tl.sum(value, 0) / width
        value = tl.where(is_dim, value - mean, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, 0) / width + eps) * scale.to(tl.float32)
    if IS_CENTRED:
        value += tl.load(bias + dims, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(output + row * width + dims, value.to(output.dtype.element_ty), mask=is_dim)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, bias, output, part_stride, x_stride, residual_stride, width, eps,
    PADDED: tl.constexpr, PARTS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IS_CENTRED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program t normalises row t."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    is_dim = dims < width
    if OVERLAPS:
        gdc_launch_dependents()
    scale = tl.load(weight + dims, mask=is_dim, other=0.0)
    if OVERLAPS:
        gdc_wait()
    source = x + row * x_stride + dims
    value = tl.load(source, mask=is_dim, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(source + part * part_stride, mask=is_dim, other=0.0)
    if HAS_RESIDUAL:
        place = residual + row * residual_stride + dims
        value = added(value, tl.load(place, mask=is_dim, other=0.0), place, is_dim)
    _put_normalised(
        value, scale, bias, output, row, dims, is_dim, width, eps, IS_CENTRED
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator,unused-ignore]
def _norm_rows_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, output, num_rows, x_stride, residual_stride, width, eps,
    PADDED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Each program normalises several rows in turn, and loads the next row while normalising
    the current row.
    """
    first, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    dims = tl.arange(0, PADDED)
    is_dim = dims < width
    if OVERLAPS:
        gdc_launch_dependents()
    scale = tl.load(weight + dims, mask=is_dim, other=0.0)
    if OVERLAPS:
        gdc_wait()
    value = tl.load(x + first * x_stride + dims, mask=is_dim, other=0.0)
    held = value
    if HAS_RESIDUAL:
        held = tl.load(residual + first * residual_stride + dims, mask=is_dim, other=0.0)
    for row in range(first, num_rows, step):
        following = row + step
        is_next = is_dim & (following < num_rows)
        next_value = tl.load(x + following * x_stride + dims, mask=is_next, other=0.0)
        next_held = next_value
        total = value.to(tl.float32)
        if HAS_RESIDUAL:
            place = residual + dims
            next_held = tl.load(place + following * residual_stride, mask=is_next, other=0.0)
            total = added(total, held, place + row * residual_stride, is_dim)
        _put_normalised(
            total, scale, weight, output, row, dims, is_dim, width, eps, False
        )  # fmt: skip
        value, held = next_value, next_held


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _norm_heads_kernel(  # type: ignore[no-untyped-def]
    heads, query_weight, key_weight, token_stride, num_queries, num_heads, eps,
    HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (t, g) normalises the g-th ``HEADS`` query and key heads of token t."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, PADDED)[None, :]
    if OVERLAPS:
        gdc_launch_dependents()
    is_dim = dims < HEAD_SIZE
    of_queries = tl.load(query_weight + dims, mask=is_dim, other=0.0).to(tl.float32)
    of_keys = tl.load(key_weight + dims, mask=is_dim, other=0.0).to(tl.float32)
    scale = tl.where(head < num_queries, of_queries, of_keys)
    if OVERLAPS:
        gdc_wait()
    place = heads + token * token_stride + head * HEAD_SIZE + dims
    is_value = (head < num_heads) & is_dim
    value = tl.load(place, mask=is_value, other=0.0).to(tl.float32)
    mean = tl.sum(value * value, 1) / HEAD_SIZE
    value *= tl.rsqrt(mean + eps)[:, None] * scale
    tl.store(place, value.to(heads.dtype.element_ty), mask=is_value)


_norm = Launcher(_norm_kernel)
_norm_rows = Launcher(_norm_rows_kernel)
_norm_heads = Launcher(_norm_heads_kernel)


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None
) -> Tensor:
    """Root-mean-square normalisation of ``x``, or of ``residual`` after adding ``x``.

    The last dim is contiguous, rows have any stride. bf16, float16 or float32, rounded once.
    With a residual, ``x`` may be float32 parts [parts, T, D], whose sum is added. Safe under
    CUDA graph capture, as all of this file.
    """
    return _normalise(x_TD, residual_TD, weight_D, None, eps)


def norm_heads(
    heads_TAH: Tensor, query_weight_H: Tensor, key_weight_H: Tensor, num_kv: int, eps: float
) -> None:
    """Root-mean-square normalisation of each query and key head in place.

    ``heads`` is a view of the product: queries, then ``num_kv`` keys and as many values,
    contiguous except for the stride of tokens.
    """
    tokens, all_heads, head_size = heads_TAH.shape
    num_heads = all_heads - num_kv
    padded = padded_size(head_size)
    chunk = min(max(1024 // padded, 1), padded_size(num_heads))
    args = (
        heads_TAH, query_weight_H, key_weight_H, heads_TAH.stride(0), num_heads - num_kv,
        num_heads, eps,
    )  # fmt: skip
    _norm_heads((tokens, num_tiles(num_heads, chunk)), args, (head_size, padded, chunk))


def layer_norm(
    x_TD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """Layer normalisation, as `rms_norm`."""
    return _normalise(x_TD, residual_TD, weight_D, bias_D, eps)


def _normalise(
    x: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
) -> Tensor:
    residual = x if residual_TD is None else residual_TD
    rows, width = residual.shape
    output = torch.empty_like(residual)
    parts, part_stride = (1, 0) if x.dim() == 2 else (x.shape[0], x.stride(0))
    padded = padded_size(width)
    warps = norm_warps(padded)
    programs = _RESIDENT_WARPS // warps
    strides = (x.stride(-2), residual.stride(0), width, eps)
    is_added = residual_TD is not None
    if bias_D is None and parts == 1 and rows >= _MANY_TURNS * programs:
        tensors = (x, residual, weight_D, output)
        _norm_rows((programs, 1), (*tensors, rows, *strides), (padded, is_added), warps)
    else:
        both = (weight_D, weight_D if bias_D is None else bias_D)
        args = (x, residual, *both, output, part_stride, *strides)
        _norm((rows, 1), args, (padded, parts, is_added, bias_D is not None), warps)
    return output


def norm_warps(padded: int) -> int:
    """Warps of a row's norm; ``padded`` is the next power of two of its width.

    The number of warps determines the order of the sums and therefore depends on the width
    alone. With four values a thread, all loads of a row are in flight at once, also where parts
    are added up.
    """
    return min(max(padded // 128, 1), 32)
