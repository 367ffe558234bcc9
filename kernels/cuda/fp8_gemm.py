"""FP8 products of few rows on Hopper: the cut of each, and its kernel."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from trimaran.kernels.build import KernelsUnavailableError
from trimaran.kernels.cuda.build import check_compiler
from trimaran.kernels.cuda.hopper_gemm import HopperGemm
from trimaran.kernels.quantized import Fp8Rows, Fp8Weight
from trimaran.kernels.tables.product_table import GemmShape, Kind

# Shapes: T tokens, D inner width, E gate and up.

MAX_ROWS = 128
"""Rows up to which this kernel is faster than the library for every product."""

MAX_PARTS_ROWS = 256
"""The same for parts of many inputs."""

_FEW_ROWS = 64
"""Rows of the smallest tile."""

_MANY_INPUTS = 8192
"""Inputs from which parts of up to `MAX_PARTS_ROWS` rows are faster than the library."""

_MULTIPLE = 16
_GATED_COLUMNS = (80, 96, 112)
_COLUMNS = (48, 64, 80, 96, 112)
_PARTS_COLUMNS = (96, 112, 128)
_MAX_SPLIT = 8
_MIN_INPUTS = 512
"""Inputs of a part that outweigh the start of a block."""


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


@functools.lru_cache(maxsize=1024)
def gated_cut(num_rows: int, outputs: int, processors: int) -> GemmShape:
    """The cut by which the processor that reads the most weights reads the fewest."""

    def max_columns(columns: int) -> int:
        tiles = -(-outputs // columns)
        return -(-tiles // processors) * columns

    return GemmShape(_tile_rows(num_rows), min(reversed(_GATED_COLUMNS), key=max_columns))


@functools.lru_cache(maxsize=1024)
def parts_cut(num_rows: int, outputs: int, inner: int, processors: int) -> GemmShape | None:
    """The cut of a product whose parts the next kernel adds up; None if another kernel is
    faster.

    All blocks run at once, and the weights of each are the fewest. Measured on an H200 for
    4,096 outputs of 4,096 and of 14,336 inputs, tiles of 112 columns are the fastest up to 16
    rows, tiles of 96 above: 1.3 to 2.5 us of 11 to 24 faster than Triton's product of up to 64
    rows, and 5 and 16 us of 20 and 42 than the library's of 128.
    """
    is_many = MAX_ROWS < num_rows <= MAX_PARTS_ROWS and inner >= _MANY_INPUTS
    if not 0 < num_rows <= MAX_ROWS and not is_many:
        return None
    best = 112 if num_rows <= 16 else 96
    cuts = []
    for columns in _PARTS_COLUMNS:
        split = min(_MAX_SPLIT, processors // -(-outputs // columns), inner // _MIN_INPUTS)
        if split > 1:
            cuts.append((columns / split * (1 if columns == best else 1.2), columns, split))
    if not cuts:
        return None
    _, columns, split = min(cuts)
    return GemmShape(_tile_rows(num_rows), columns, split)


@functools.lru_cache(maxsize=1024)
def whole_cut(num_rows: int, outputs: int, inner: int, processors: int) -> GemmShape | None:
    """The cut of a product that is stored whole; None if another kernel is faster.

    On an H200 128 rows by 6,144 outputs of 4,096 values take 14.1 us with the quantization, by
    the library 16.0; 4,096 outputs of 14,336 values 30 and 42.
    """
    if not _FEW_ROWS < num_rows <= MAX_ROWS:
        return None

    def weights_of_a_block(cut: tuple[int, int]) -> float:
        columns, split = cut
        tiles = -(-outputs // columns)
        exchange = 0 if split == 1 else 8
        return -(-tiles * split // processors) * columns / split + exchange

    splits = [split for split in (1, 2, 3) if split == 1 or inner >= split * _MIN_INPUTS]
    cuts = [(columns, split) for split in splits for columns in _COLUMNS]
    return GemmShape(_tile_rows(num_rows), *min(cuts, key=weights_of_a_block))


def _tile_rows(num_rows: int) -> int:
    return next(rows for rows in (64, 128, 256) if num_rows <= rows)


def multiply_gated(x: Fp8Rows, weight: Fp8Weight) -> Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` [T, E / 2] of 1 to `MAX_ROWS` rows, by a weight that
    `can_multiply` allows. Safe under CUDA graph capture, as all of this file.

    With the quantization of rows, products of 1, 16, 64 and 128 rows with 28,672 outputs of
    4,096 values take 30.3, 30.5, 30.9 and 37.6 us on an H200; Triton's product and SwiGLU take
    32.1, 33.7 and 37.4, the library's and SwiGLU of 128 rows 44.0. The bytes take 28 at 4.2
    TB/s.
    """
    rows, outputs = x.values.shape[0], weight.values.shape[0]
    return _multiply(x, weight, gated_cut(rows, outputs, _processors(weight)), "gated")


def can_make_parts(num_rows: int, weight: Fp8Weight) -> bool:
    """Whether `multiply_parts` takes so many rows; see `parts_cut`."""
    return parts_cut(num_rows, *weight.values.shape, _processors(weight)) is not None


def multiply_parts(x: Fp8Rows, weight: Fp8Weight) -> Tensor:
    """Float32 [S, T, E] whose sum over S is ``x @ weight.T``, if it `can_make_parts`."""
    cut = parts_cut(x.values.shape[0], *weight.values.shape, _processors(weight))
    assert cut is not None, "another kernel multiplies so many rows"
    return _multiply(x, weight, cut, "parts")


def multiply(x: Fp8Rows, weight: Fp8Weight) -> Tensor | None:
    """``x @ weight.T`` [T, E]; None as `whole_cut`."""
    cut = whole_cut(x.values.shape[0], *weight.values.shape, _processors(weight))
    return None if cut is None else _multiply(x, weight, cut, "plain")


def _multiply(x: Fp8Rows, weight: Fp8Weight, cut: GemmShape, kind: Kind) -> Tensor:
    kernel = _kernel(cut, kind, x.dtype, x.values.device)
    return kernel.multiply_fp8(x.values, x.scales, weight.values, weight.scales)


@functools.lru_cache(maxsize=256)
def _kernel(cut: GemmShape, kind: Kind, dtype: torch.dtype, device: torch.device) -> HopperGemm:
    return HopperGemm(cut, dtype, device, kind, is_fp8=True)


def _processors(weight: Fp8Weight) -> int:
    return _num_processors(weight.values.device)


@functools.lru_cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
