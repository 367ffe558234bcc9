"""Inputs of products in FP8 or INT8, quantized on a GPU: a scale a token, a group of inputs, or
static."""

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

from trimaran.kernels.quantized import FP8, BlockMap, ByteInputs
from trimaran.kernels.triton.launch import Launcher, num_tiles, padded_size

# Shapes: T tokens, D inner width, G groups of inputs.

_FEW_TOKENS = 128
"""Tokens up to which more warps a token are faster: 0.4 us of 3 for 64 tokens on an H200."""

_GROUP_VALUES = 2048
"""Values of a token that a program quantizes in groups."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def scale_of(peak, HAS_POWERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scale by which values up to ``peak`` use the whole range of e4m3."""
    scale = tl.div_rn(tl.maximum(peak, 1e-10), 448.0)
    if HAS_POWERS:
        # Up to the next power of two, unless the mantissa is zero.
        bits = scale.to(tl.int32, bitcast=True) + 0x007FFFFF
        scale = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def as_fp8(value, scale):  # type: ignore[no-untyped-def]
    """``value / scale`` in e4m3, clamped to its range."""
    scaled = value * tl.div_rn(1.0, scale)
    return tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _integer_scale(value, static, IS_STATIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scale of a token in INT8; NaN if some values are no numbers, which no byte says."""
    # In the order of their bits, NaN is the largest of the numbers that are not negative.
    bits = tl.abs(value).to(tl.int32, bitcast=True)
    peak = tl.max(bits, 0).to(tl.float32, bitcast=True)
    if IS_STATIC:
        scale = tl.load(static) + 0.0 * peak
    else:
        peak = tl.maximum(peak, 1e-10, propagate_nan=tl.PropagateNan.ALL)
        scale = tl.div_rn(peak, 127.0)
    return scale


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def as_int8(value, scale):  # type: ignore[no-untyped-def]
    """``value / scale``, clamped and rounded to the nearest, halves to even."""
    scaled = value * tl.div_rn(1.0, scale)
    # The sum with 3 * 2**22 has no bits behind the point.
    clamped = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
    return ((clamped + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def put_quantized(  # type: ignore[no-untyped-def]
    value, static, values, scales, row, dims, is_dim, width, bound, IS_STATIC: tl.constexpr,
    HAS_BOUND: tl.constexpr, HAS_POWERS: tl.constexpr,
):  # fmt: skip
    """Quantizes a token in the dtype of ``values``; ``value`` is zero where ``is_dim`` is
    false."""
    IS_INTEGER: tl.constexpr = values.dtype.element_ty == tl.int8
    if IS_INTEGER:
        scale = _integer_scale(value, static, IS_STATIC)
    elif IS_STATIC:
        scale = tl.load(static)
    else:
        peak = tl.max(tl.abs(value), 0)
        if HAS_BOUND:
            peak = tl.minimum(peak, bound)
        scale = scale_of(peak, HAS_POWERS)
    tl.store(scales + row, scale)
    if IS_INTEGER:
        quantized = as_int8(value, scale)
    else:
        quantized = as_fp8(value, scale)
    tl.store(values + row * width + dims, quantized, mask=is_dim)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _tokens_kernel(  # type: ignore[no-untyped-def]
    x, static, values, scales, x_stride, width, bound, PADDED: tl.constexpr,
    IS_STATIC: tl.constexpr, HAS_BOUND: tl.constexpr, HAS_POWERS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program t quantizes token t."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    is_dim = dims < width
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_stride + dims, mask=is_dim, other=0.0).to(tl.float32)
    put_quantized(
        value, static, values, scales, row, dims, is_dim, width, bound, IS_STATIC, HAS_BOUND,
        HAS_POWERS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _groups_kernel(  # type: ignore[no-untyped-def]
    x, values, scales, x_stride, width, num_groups, FIRST: tl.constexpr, SIZE: tl.constexpr,
    GROUPS: tl.constexpr, HAS_POWERS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (t, g) quantizes the g-th ``GROUPS`` groups of token t."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    dims = groups[:, None] * SIZE - FIRST + tl.arange(0, SIZE)[None, :]
    is_dim = (dims >= 0) & (dims < width)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_stride + dims, mask=is_dim, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(value), 1), HAS_POWERS)
    tl.store(scales + row * num_groups + groups, scale, mask=groups < num_groups)
    tl.store(values + row * width + dims, as_fp8(value, scale[:, None]), mask=is_dim)


@triton.jit(do_not_specialize=["first_expert"])  # type: ignore[untyped-decorator,unused-ignore]
def _choices_kernel(  # type: ignore[no-untyped-def]
    x, ids, order, totals, static, values, scales, x_stride, width, bound, first_expert,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, COUNTED: tl.constexpr,
    IS_GATHERED: tl.constexpr, IS_STATIC: tl.constexpr, HAS_BOUND: tl.constexpr,
    HAS_POWERS: tl.constexpr, PADDED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program n quantizes row n for the n-th sorted choice, with ``IS_GATHERED`` the token of
    that choice, or choice n's token for choice n.

    Choices are sorted if ``COUNTED``, the experts in ``totals``, is not zero. Rows of other
    ranks' experts are left as they are.
    """
    row = tl.program_id(0)
    dims = tl.arange(0, PADDED)
    is_dim = dims < width
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    if COUNTED:
        # Entries of the order behind those of this rank's experts are uninitialised.
        is_used = row < tl.sum(tl.load(totals + tl.arange(0, COUNTED)), 0)
        choice = tl.load(order + row, mask=is_used, other=0)
        source = choice // CHOSEN if IS_GATHERED else row
    else:
        is_used, choice, source = row >= 0, row, row // CHOSEN
    expert = tl.load(ids + choice) - first_expert
    if is_used & (expert >= 0) & (expert < EXPERTS):
        token = x + source.to(tl.int64) * x_stride
        value = tl.load(token + dims, mask=is_dim, other=0.0).to(tl.float32)
        if IS_STATIC:
            scale = tl.load(static + expert)
        else:
            peak = tl.max(tl.abs(value), 0)
            if HAS_BOUND:
                peak = tl.minimum(peak, bound)
            scale = scale_of(peak, HAS_POWERS)
        tl.store(scales + row, scale)
        target = values + row.to(tl.int64) * width + dims
        tl.store(target, as_fp8(value, scale), mask=is_dim)


_choices = Launcher(_choices_kernel)
_tokens = Launcher(_tokens_kernel)
_groups = Launcher(_groups_kernel)


class Choices(NamedTuple):
    """The experts that tokens chose."""

    ids: Tensor
    """int32 [T, C]."""

    first_expert: int
    """The first of this rank's experts."""

    num_experts: int
    sorted_by: tuple[Tensor, Tensor] | None = None
    """int32 [N]: the numbers of the choices sorted by expert, those of this rank's experts
    first; and int32 [X]: the number of each expert's choices, padded to a power of two."""

    of_tokens: bool = False
    """Whether inputs are the tokens' rows also with ``sorted_by``."""


def quantize_choices(x: Tensor, choices: Choices, inputs: ByteInputs) -> tuple[Tensor, Tensor]:
    """FP8 values [N, D] and float32 scales [N]; a static scale is that of the expert.

    Row n is that of choice n's token; with an order that of the n-th choice of the order, of
    ``x`` too, which is [N, D] then unless ``of_tokens``. Rows of other ranks' experts are
    uninitialised. As `quantize_tokens` otherwise.
    """
    ids, first, count, by, of_tokens = choices
    rows, width, static = ids.numel(), x.shape[1], inputs.scale
    values_ND = torch.empty((rows, width), dtype=FP8, device=x.device)
    scales_N = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        order, totals = by or (ids, ids)
        args = (
            x, ids, order, totals, scales_N if static is None else static, values_ND, scales_N,
            x.stride(0), width, float(inputs.bound), first,
        )  # fmt: skip
        constants = (
            count, ids.shape[1], totals.numel() if by else 0, of_tokens, static is not None,
            inputs.bound > 0, inputs.has_power_scales, padded_size(width),
        )  # fmt: skip
        _choices((rows, 1), args, constants, num_warps=token_warps(width))
    return values_ND, scales_N


def token_warps(width: int) -> int:
    """Warps of a program that quantizes a token."""
    padded = padded_size(width)
    return 4 if padded <= 4096 else 8 if padded <= 8192 else 16


def quantize_tokens(x_TD: Tensor, inputs: ByteInputs) -> tuple[Tensor, Tensor]:
    """Values [T, D] in the dtype of ``inputs``; float32 scales [T], also if they are static.

    bf16, float16 or float32 with contiguous rows. Safe under CUDA graph capture.
    """
    rows, width = x_TD.shape
    values_TD = torch.empty((rows, width), dtype=inputs.dtype, device=x_TD.device)
    scales_T = torch.empty(rows, dtype=torch.float32, device=x_TD.device)
    if rows:
        static = inputs.scale
        args = (
            x_TD, scales_T if static is None else static, values_TD, scales_T, x_TD.stride(0),
            width, float(inputs.bound),
        )  # fmt: skip
        flags = (static is not None, inputs.bound > 0, inputs.has_power_scales)
        padded = padded_size(width)
        # Four values a thread: all loads of a row are in flight at once.
        few = min(max(padded // 128, 1), 32) if rows <= _FEW_TOKENS else 0
        _tokens((rows, 1), args, (padded, *flags), num_warps=max(few, token_warps(width)))
    return values_TD, scales_T


def quantize_groups(
    x_TD: Tensor, blocks: BlockMap, inputs: ByteInputs
) -> tuple[Tensor, Tensor]:
    """FP8 values [T, D] and float32 scales [T, G]; as `quantize_tokens`, and the size of
    groups is a power of two."""
    (rows, width), num_groups = x_TD.shape, len(blocks.groups(x_TD.shape[1]))
    values_TD = torch.empty((rows, width), dtype=FP8, device=x_TD.device)
    scales_TG = torch.empty((rows, num_groups), dtype=torch.float32, device=x_TD.device)
    if rows:
        each = min(padded_size(num_groups), max(1, _GROUP_VALUES // blocks.size))
        args = (x_TD, values_TD, scales_TG, x_TD.stride(0), width, num_groups)
        constants = (blocks.first, blocks.size, each, inputs.has_power_scales)
        _groups((rows, num_tiles(num_groups, each)), args, constants)
    return values_TD, scales_TG
