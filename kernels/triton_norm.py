"""Normalisation on a GPU, a row a program, with the residual's addition fused in."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.triton_launch import Launcher

# Shapes: T tokens, D width.


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, bias, output, x_stride, residual_stride, width, eps,
    PADDED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_CENTRED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program t normalises row t in float32; its sums do not depend on the other rows."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    is_dim = dims < width
    if OVERLAPS:
        gdc_launch_dependents()
    scale = tl.load(weight + dims, mask=is_dim, other=0.0)
    if OVERLAPS:
        gdc_wait()
    value = tl.load(x + row * x_stride + dims, mask=is_dim, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual + row * residual_stride + dims
        value += tl.load(place, mask=is_dim, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=is_dim)
        value = rounded.to(tl.float32)
    if IS_CENTRED:
        mean = tl.sum(value, 0) / width
        value = tl.where(is_dim, value - mean, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, 0) / width + eps) * scale.to(tl.float32)
    if IS_CENTRED:
        value += tl.load(bias + dims, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(output + row * width + dims, value.to(output.dtype.element_ty), mask=is_dim)


_norm = Launcher(_norm_kernel)


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None
) -> Tensor:
    """Root-mean-square normalisation of ``x``, or of ``residual`` after adding ``x`` to it.

    The last dim is contiguous, rows have any stride. bf16, float16 or float32, rounded once.
    Safe under CUDA graph capture, as all of this file.
    """
    return _normalise(x_TD, residual_TD, weight_D, None, eps)


def layer_norm(
    x_TD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """Layer normalisation of ``x``, or of ``residual`` after adding ``x`` to it."""
    return _normalise(x_TD, residual_TD, weight_D, bias_D, eps)


def _normalise(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
) -> Tensor:
    rows, width = x_TD.shape
    output = torch.empty_like(x_TD)
    residual = x_TD if residual_TD is None else residual_TD
    padded = triton.next_power_of_2(width)
    bias = weight_D if bias_D is None else bias_D
    args = (x_TD, residual, weight_D, bias, output)
    sizes = (x_TD.stride(0), residual.stride(0), width, eps)
    constants = (padded, residual_TD is not None, bias_D is not None)
    # The number of warps sets the order of the sums: it may depend on the width alone.
    _norm((rows, 1), args + sizes, constants, min(max(padded // 512, 1), 16))
    return output
