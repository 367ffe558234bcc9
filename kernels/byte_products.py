"""Products in FP8 and INT8 on a GPU: the kernel for a weight and a number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.kernels.cuda import byte_gemm
from trimaran.kernels.quantized import (
    FP8,
    INT8,
    BlockMap,
    ByteInputs,
    ByteProduct,
    ByteRows,
    ByteWeight,
)
from trimaran.kernels.triton import byte_rows
from trimaran.kernels.triton.byte_gemm import (
    MAX_STREAM_ROWS,
    Inputs,
    Tile,
    multiply_stream,
    multiply_tiles,
)
from trimaran.kernels.triton.byte_inputs import quantize_groups, quantize_tokens
from trimaran.kernels.triton.launch import padded_size

# Shapes: T tokens, D inner width, E outputs.

_MIN_BLOCK, _MAX_BLOCK = 32, 256
_HOPPER = (9, 0)
_LIBRARY_MULTIPLE = 16
"""Widths and outputs that the library's product takes are multiples of this."""

_FULL_TILES = 192
"""Programs from which a product keeps all multiprocessors of the largest GPU busy."""

_FEW_TILES = 64

_FEW_ROWS = 64
"""Rows up to which a gated activation and its quantization are faster apart: on an H200 64 rows
of 14,336 take 4.5 us apart and 4.6 together, 256 rows 8.0 and 6.0, 8,192 rows 258 and 161."""

_MAX_PARTS = 8


def stream_tile(rows: int, outputs: int, inner: int, *, has_blocks: bool = False) -> Tile:
    """The cut of a product of few rows: enough programs for all multiprocessors.

    Measured on an H200 by the 8B shape, in a CUDA graph behind the quantization of the inputs:
    steps of 256 inputs instead of 128 save 1 to 5 us of 10 to 25 us where tiles are few.
    """
    columns = 64
    tiles = -(-outputs // columns)
    has_long_steps = inner % 512 == 0 and not has_blocks
    parts = 1
    if rows <= 16 or not has_long_steps:
        while (
            tiles * parts < _FULL_TILES and parts < _MAX_PARTS and inner // (2 * parts) >= 512
        ):
            parts *= 2
    elif tiles < _FULL_TILES:
        parts = 2
    if has_long_steps and (rows <= 16 or tiles <= _FEW_TILES):
        return Tile(max(16, padded_size(rows)), columns, 256, parts, 4, 4)
    return Tile(max(16, padded_size(rows)), columns, 128, parts, 4, 6)


FIXED_TILE = Tile(64, 128, 128, warps=4, stages=4)
"""The cut of a product of many rows, and whatever their number for results that do not depend
on it. On an H200 tiles of 128 rows take 5 to 30 % longer."""


class GpuByteProduct(ByteProduct):
    """`ByteProduct` by Triton's kernels, by the library for many rows of FP8 with a scale per
    row, and by our Hopper kernel for few rows of FP8 and all numbers of rows of INT8.

    With ``is_fixed`` a token's result does not depend on the other tokens or their number. All
    kernels of INT8 make the same bits without a bias, since their sums are exact; sums of parts
    are not.
    """

    def __init__(self, weight: ByteWeight, inputs: ByteInputs, *, is_fixed: bool) -> None:
        self._weight = weight
        self._inputs = inputs
        self._is_fixed = is_fixed
        self._is_exact = weight.values.dtype is INT8
        self._has_library = not is_fixed and can_use_library(weight)
        can_choose = not is_fixed or self._is_exact
        self._has_hopper = can_choose and byte_gemm.can_multiply(weight)

    def __call__(self, x_TD: Tensor | ByteRows, bias_E: Tensor | None = None) -> Tensor:
        """See `ByteProduct`. Safe under CUDA graph capture, as all methods."""
        weight, dtype = self._weight, x_TD.dtype
        x = (
            Inputs(x_TD.values, x_TD.scales)
            if isinstance(x_TD, ByteRows)
            else self.quantize(x_TD)
        )
        if self._is_fixed and not (self._is_exact and bias_E is None):
            return multiply_tiles(x, weight, bias_E, dtype, FIXED_TILE)
        rows, (outputs, inner) = x.values.shape[0], weight.values.shape
        can_use_hopper = self._can_use_hopper(x_TD) and bias_E is None
        if can_use_hopper and byte_gemm.can_multiply_whole(rows, weight):
            quantized = ByteRows(x.values, x.scales, dtype)
            return byte_gemm.multiply(quantized, weight, is_fixed=self._is_fixed)
        is_grouped = isinstance(x_TD, ByteRows) and x_TD.has_groups
        assert not is_grouped, "other kernels take a scale a token"
        if rows <= MAX_STREAM_ROWS:
            has_blocks = weight.blocks is not None
            tile = stream_tile(rows, outputs, inner, has_blocks=has_blocks)
            return multiply_stream(x, weight, bias_E, dtype, tile)
        if self._has_library and dtype is torch.bfloat16:
            return multiply_by_library(x, weight, bias_E)
        return multiply_tiles(x, weight, bias_E, dtype, FIXED_TILE)

    def parts(self, x_TD: Tensor | ByteRows) -> Tensor | None:
        """Few rows by our Hopper kernel."""
        if self._is_fixed:
            return None
        # Asked before rows are quantized, because the whole product quantizes them itself.
        if not self._can_use_hopper(x_TD) or not byte_gemm.can_make_parts(
            _num_rows(x_TD), self._weight
        ):
            return None
        return byte_gemm.multiply_parts(self._rows(x_TD), self._weight)

    def gated(self, x_TD: Tensor | ByteRows) -> Tensor | None:
        """Few rows of FP8 and any rows of INT8 by our Hopper kernel."""
        if self._is_fixed:
            return None
        if not self._can_use_hopper(x_TD) or not byte_gemm.can_gate(
            _num_rows(x_TD), self._weight
        ):
            return None
        return byte_gemm.multiply_gated(self._rows(x_TD), self._weight)

    def grouped_inputs(self, num_rows: int) -> ByteInputs | None:
        """Few rows by our Hopper kernel."""
        can_group = self._has_hopper and not self._inputs.has_power_scales
        can_group = can_group and self._inputs.dtype is not INT8
        if not can_group or not byte_gemm.takes_groups(num_rows, self._weight):
            return None
        return self._inputs

    def _can_use_hopper(self, x_TD: Tensor | ByteRows) -> bool:
        return self._has_hopper and x_TD.dtype in (torch.bfloat16, torch.float16)

    def _rows(self, x_TD: Tensor | ByteRows) -> ByteRows:
        """The quantized inputs, with a scale a token."""
        if isinstance(x_TD, ByteRows):
            return x_TD
        return ByteRows(*quantize_tokens(x_TD, self._inputs), x_TD.dtype)

    def normalise(
        self, x: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float
    ) -> ByteRows | None:
        """Inputs with a scale a token, in one kernel."""
        if self._weight.blocks is not None:
            return None
        return byte_rows.rms_norm(x, residual_TD, weight_D, eps, self._inputs)

    def activate(self, gate_up_TE: Tensor, name: str) -> ByteRows | None:
        """Inputs with a scale a token, in one kernel. A program has a whole row: separate
        kernels with several programs a row are faster for few rows."""
        if self._weight.blocks is not None or gate_up_TE.shape[0] <= _FEW_ROWS:
            return None
        return byte_rows.gated_activation(gate_up_TE, name, self._inputs)

    def quantize(self, x_TD: Tensor) -> Inputs:
        """The quantized inputs, and their scales."""
        if self._weight.blocks is None:
            return Inputs(*quantize_tokens(x_TD, self._inputs))
        return Inputs(*quantize_groups(x_TD, self._weight.blocks, self._inputs))


def _num_rows(x_TD: Tensor | ByteRows) -> int:
    return (x_TD.values if isinstance(x_TD, ByteRows) else x_TD).shape[0]


def multiply_by_library(x: Inputs, weight: ByteWeight, bias_E: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` [T, E] in bf16, with a scale a row and an output.

    The matrix units' sums have 22 bits. Sums in float32 take 10 to 17 % longer on an H200, and
    the error of 22 bits is less than a tenth of that which FP8 inputs and weights cause.
    """
    return torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=x.scales[:, None],
        scale_b=weight.scales[None, :],
        bias=bias_E,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def can_use_library(weight: ByteWeight) -> bool:
    """Whether torch multiplies by this weight."""
    if weight.blocks is not None or weight.values.device.type != "cuda":
        return False
    if weight.values.dtype is not FP8:
        return False
    outputs, inner = weight.values.shape
    if outputs % _LIBRARY_MULTIPLE or inner % _LIBRARY_MULTIPLE:
        return False
    return torch.cuda.get_device_capability(weight.values.device) >= _HOPPER


def make_product(weight: ByteWeight, inputs: ByteInputs, *, is_fixed: bool) -> ByteProduct:
    """The product by a weight on a GPU.

    Raises:
        ConfigError: the GPU has no FP8 products, or the blocks have another size than the
            kernels take.
    """
    check_served(weight.values, weight.blocks)
    return GpuByteProduct(weight, inputs, is_fixed=is_fixed)


def check_served(values: Tensor, blocks: BlockMap | None) -> None:
    """Raise `ConfigError` unless the GPU multiplies by these FP8 or INT8 values."""
    device = values.device
    if values.dtype is INT8:
        return
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            f"the weights are FP8, but {torch.cuda.get_device_name(device)} has no products of "
            "FP8. Serve a checkpoint in bfloat16, or on a GPU of compute capability 8.9 or up."
        )
    size = _MIN_BLOCK if blocks is None else blocks.size
    if size != padded_size(size) or not _MIN_BLOCK <= size <= _MAX_BLOCK:
        raise ConfigError(
            f"the weights have blocks of {size} columns, but the GPU's kernels take powers of "
            f"two from {_MIN_BLOCK} to {_MAX_BLOCK}. Serve another checkpoint, or on the CPU."
        )
