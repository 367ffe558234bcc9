"""Norms and gated activations on a GPU whose results are a product's FP8 or INT8 inputs."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.quantized import ByteInputs, ByteRows
from trimaran.kernels.triton.byte_inputs import put_quantized, token_warps
from trimaran.kernels.triton.elementwise import CODES, activate
from trimaran.kernels.triton.launch import Launcher, padded_size
from trimaran.kernels.triton.norm import added, norm_warps

# Shapes: T tokens, D width, E = 2 F gate and up.


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, static, values, scales, part_stride, x_stride, residual_stride, width,
    eps, bound, PADDED: tl.constexpr, PARTS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IS_STATIC: tl.constexpr, HAS_BOUND: tl.constexpr, HAS_POWERS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program t normalises row t, rounds as a norm's output is rounded, and quantizes."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    is_dim = dims < width
    if OVERLAPS:
        gdc_launch_dependents()
    factor = tl.load(weight + dims, mask=is_dim, other=0.0)
    if OVERLAPS:
        gdc_wait()
    source = x + row * x_stride + dims
    value = tl.load(source, mask=is_dim, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(source + part * part_stride, mask=is_dim, other=0.0)
    place = residual + row * residual_stride + dims
    if HAS_RESIDUAL:
        value = added(value, tl.load(place, mask=is_dim, other=0.0), place, is_dim)
    value *= tl.rsqrt(tl.sum(value * value, 0) / width + eps) * factor.to(tl.float32)
    value = value.to(residual.dtype.element_ty).to(tl.float32)
    put_quantized(
        value, static, values, scales, row, dims, is_dim, width, bound, IS_STATIC, HAS_BOUND,
        HAS_POWERS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gated_kernel(  # type: ignore[no-untyped-def]
    gate_up, static, values, scales, row_stride, width, bound, PADDED: tl.constexpr,
    CODE: tl.constexpr, IS_STATIC: tl.constexpr, HAS_BOUND: tl.constexpr,
    HAS_POWERS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program t computes the gated activation of row t, rounds, and quantizes."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    is_dim = dims < width
    source = gate_up + row * row_stride + dims
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(source, mask=is_dim, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=is_dim, other=0.0).to(tl.float32)
    value = (activate(gate, CODE) * up).to(gate_up.dtype.element_ty).to(tl.float32)
    put_quantized(
        value, static, values, scales, row, dims, is_dim, width, bound, IS_STATIC, HAS_BOUND,
        HAS_POWERS,
    )  # fmt: skip


_norm = Launcher(_norm_kernel)
_gated = Launcher(_gated_kernel)


def _empty(rows: int, width: int, like: Tensor, inputs: ByteInputs) -> ByteRows:
    return ByteRows(
        torch.empty((rows, width), dtype=inputs.dtype, device=like.device),
        torch.empty(rows, dtype=torch.float32, device=like.device),
        like.dtype,
    )


def _flags(inputs: ByteInputs) -> tuple[bool, bool, bool]:
    return inputs.scale is not None, inputs.bound > 0, inputs.has_power_scales


def rms_norm(
    x: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, inputs: ByteInputs
) -> ByteRows:
    """`norm.rms_norm`, quantized as `byte_inputs.quantize_tokens` would: to the same bits.

    On an H200 1, 64, 256 and 8,192 rows of 4,096 take 1.9, 2.1, 3.1 and 84 us with a residual,
    by two kernels 2.4, 3.3, 5.4 and 94.

    Safe under CUDA graph capture, as all of this file.
    """
    residual = x if residual_TD is None else residual_TD
    rows, width = residual.shape
    output = _empty(rows, width, residual, inputs)
    parts, part_stride = (1, 0) if x.dim() == 2 else (x.shape[0], x.stride(0))
    static = output.scales if inputs.scale is None else inputs.scale
    padded = padded_size(width)
    args = (
        x, residual, weight_D, static, output.values, output.scales, part_stride, x.stride(-2),
        residual.stride(0), width, eps, float(inputs.bound),
    )  # fmt: skip
    constants = (padded, parts, residual_TD is not None, *_flags(inputs))
    if rows:
        _norm((rows, 1), args, constants, norm_warps(padded))
    return output


def gated_activation(gate_up_TE: Tensor, name: str, inputs: ByteInputs) -> ByteRows:
    """`elementwise.gated_activation`, quantized as `byte_inputs.quantize_tokens` would."""
    rows, width = gate_up_TE.shape[0], gate_up_TE.shape[1] // 2
    output = _empty(rows, width, gate_up_TE, inputs)
    static = output.scales if inputs.scale is None else inputs.scale
    args = (
        gate_up_TE, static, output.values, output.scales, gate_up_TE.stride(0), width,
        float(inputs.bound),
    )  # fmt: skip
    constants = (padded_size(width), CODES[name], *_flags(inputs))
    if rows:
        _gated((rows, 1), args, constants, token_warps(width))
    return output
