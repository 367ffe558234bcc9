"""SwiGLU of FP8 products of few rows on Hopper: the cut of each, and its kernel."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from trimaran.kernels.build import KernelsUnavailableError
from trimaran.kernels.cuda.build import check_compiler
from trimaran.kernels.cuda.hopper_gemm import HopperGemm
from trimaran.kernels.quantized import Fp8Rows, Fp8Weight
from trimaran.kernels.tables.product_table import GemmShape

# Shapes: T tokens, D inner width, E gate and up.

MAX_ROWS = 64
"""Rows up to which the weight's bytes take longer than the products."""

_MULTIPLE = 16
_COLUMNS = (80, 96, 112)


def can_multiply(weight: Fp8Weight) -> bool:
    """Whether the kernel takes this weight, and can be compiled here."""
    values = weight.values
    if weight.blocks is not None or values.device.type != "cuda":
        return False
    outputs, inner = values.shape
    if outputs % (2 * _MULTIPLE) or inner % _MULTIPLE:
        return False
    if torch.cuda.get_device_capability(values.device) != (9, 0):
        return False
    try:
        check_compiler()
    except KernelsUnavailableError:
        return False
    return True


@functools.lru_cache(maxsize=256)
def gated_cut(outputs: int, processors: int) -> GemmShape:
    """The cut by which the processor that reads the most weights reads the fewest."""

    def max_columns(columns: int) -> int:
        tiles = -(-outputs // columns)
        return -(-tiles // processors) * columns

    return GemmShape(64, min(reversed(_COLUMNS), key=max_columns))


def multiply_gated(x: Fp8Rows, weight: Fp8Weight) -> Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` [T, E / 2] of 1 to `MAX_ROWS` rows, by a weight that
    `can_multiply` allows. Safe under CUDA graph capture.

    With the quantization of rows, products of 1, 16 and 64 rows with 28,672 outputs of 4,096
    values take 30.3, 30.5 and 30.9 us on an H200; Triton's product and SwiGLU take 32.1, 33.7
    and 37.4. The bytes take 28 at 4.2 TB/s.
    """
    device = x.values.device
    cut = gated_cut(weight.values.shape[0], _num_processors(device))
    kernel = _kernel(cut, x.dtype, device)
    return kernel.multiply_fp8(x.values, x.scales, weight.values, weight.scales)


@functools.lru_cache(maxsize=64)
def _kernel(cut: GemmShape, dtype: torch.dtype, device: torch.device) -> HopperGemm:
    return HopperGemm(cut, dtype, device, "gated", is_fp8=True)


@functools.lru_cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
