"""Integer weights packed for the Hopper kernel: in the order of its threads' registers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trimaran.kernels.integer_columns import Columns, narrowest
from trimaran.kernels.integer_reference import unpack
from trimaran.kernels.integers import IntegerWeight

# Shapes: E outputs, K columns, S steps, N tiles of 64 outputs, C units of 128 columns.

UNIT_OUTPUTS, UNIT_INPUTS = 64, 128
_MAX_ZERO = {4: 127, 8: 255}
"""Largest zero point of which the difference to an integer is exact in the kernel."""

_SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_EXPONENTS = 3
"""The kind of scales that are exponents of one byte."""

_FP4_EXPONENTS = range(27, 145)
"""Biased exponents of scales in float32 whose products with FP4 numbers are exact."""

_FP4_BIAS = 110
"""What is added to these exponents; see ``cuda/csrc/fp4_units.cuh``."""

_FP4_SIGNS, _FP4_BITS = (15, 14, 9, 13), (6, 3, 0, 10)
"""For each register of a fragment the lowest bits of a code's parts in its half of the word."""

_MANTISSA_BITS = 23


class Units(NamedTuple):
    """A weight in units of 64 outputs x 128 columns; see ``cuda/csrc/integer_units.cuh``."""

    values: Tensor
    """uint8 [N, C, bytes of a unit]: integers, scales, and zeros if there are any."""

    outputs: int
    bits: int
    groups: int
    """Groups of a unit: 1, 2 or 4."""

    has_zeros: bool
    scales: int
    """The dtype of scales: 0 for bfloat16, 1 for float16, 2 for float32; 3 for exponents of
    FP4 numbers."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        return self.values.shape[2]


class UnitFormat(NamedTuple):
    """What a kernel on units is compiled for."""

    bits: int
    groups: int
    has_zeros: bool
    scales: int
    is_float16: bool

    @classmethod
    def of(cls, units: Units, dtype: torch.dtype) -> UnitFormat:
        """The format of units beside inputs of ``dtype``, bfloat16 or float16."""
        is_float16 = dtype == torch.float16
        return cls(units.bits, units.groups, units.has_zeros, units.scales, is_float16)

    @property
    def defines(self) -> tuple[str, ...]:
        """Macros of ``cuda/csrc/integer_units.cuh``."""
        macros = (
            f"INT_BITS={self.bits}",
            f"INT_GROUPS={self.groups}",
            f"INT_ZEROS={int(self.has_zeros)}",
            f"INT_SCALES={self.scales}",
            *(["INT_FP4=1"] if self.scales == _EXPONENTS else []),
        )
        return (*macros, "GEMM_FLOAT16") if self.is_float16 else macros


def aligned_rows(x_TK: Tensor) -> Tensor:
    """The same inputs as the kernels' tensor maps take them: K a multiple of 8, rows
    contiguous."""
    if x_TK.shape[1] % 8:
        return torch.nn.functional.pad(x_TK, (0, -x_TK.shape[1] % 8))
    if x_TK.stride(1) != 1 or x_TK.stride(0) % 8 or x_TK.data_ptr() % 16:
        return x_TK.clone(memory_format=torch.contiguous_format)
    return x_TK


def can_pack(weight: IntegerWeight) -> bool:
    """Whether the units hold the weight: integers without minimums, whose zero points are in
    the kernel's range."""
    if weight.minimums is not None or weight.is_fp4 or not weight.values.numel():
        return False
    zeros = weight.zeros
    return zeros is None or bool(((zeros >= 0) & (zeros <= _MAX_ZERO[weight.bits])).all())


def can_pack_fp4(weight: IntegerWeight, columns: Columns) -> bool:
    """Whether the units hold a weight of FP4 numbers: 32 inputs share a power of two, in the
    kernel's range."""
    if not weight.is_fp4 or columns.order is not None or not weight.values.numel():
        return False
    if columns.step != UNIT_INPUTS // 4:
        return False
    bits = weight.scales.view(torch.int32)
    exponents = bits >> _MANTISSA_BITS
    is_power = exponents << _MANTISSA_BITS == bits
    least, most = _FP4_EXPONENTS[0], _FP4_EXPONENTS[-1]
    return bool((is_power & (exponents >= least) & (exponents <= most)).all())


def pack_units(
    weight: IntegerWeight, columns: Columns, dtype: torch.dtype | None = None
) -> Units:
    """The weight in units. Outputs and columns that fill the last units are arbitrary: the
    inputs of such columns must be 0.

    ``dtype`` is that of scales; None: the narrowest that holds them.
    """
    integers_EK = columns.arrange(unpack(weight.values, weight.bits))
    steps = columns.groups.to(torch.int64)
    groups = UNIT_INPUTS // columns.step
    steps = torch.nn.functional.pad(steps, (0, -len(steps) % groups))
    parts = [_values(_padded(integers_EK, UNIT_OUTPUTS, UNIT_INPUTS), weight.bits)]
    if weight.is_fp4:
        parts = [_fp4_words(parts[0]), _exponents(weight.scales[:, steps], groups)]
        return Units(torch.cat(parts, 2), len(weight.values), 4, groups, False, _EXPONENTS)
    dtype = dtype or narrowest([weight.scales])
    parts.append(_pairs(weight.scales.to(dtype)[:, steps], groups))
    if weight.zeros is not None:
        parts.append(_pairs(weight.zeros[:, steps], groups))
    return Units(
        torch.cat(parts, 2),
        weight.values.shape[0],
        weight.bits,
        groups,
        weight.zeros is not None,
        _SCALE_DTYPES.index(dtype),
    )


def _padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    sizes = (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows)
    return torch.nn.functional.pad(matrix, sizes)


def _values(integers_EK: Tensor, bits: int) -> Tensor:
    """uint8 [N, C, bytes]: words of a thread, its fragments of 16 columns in order."""
    tiles = integers_EK.shape[0] // UNIT_OUTPUTS
    units = integers_EK.shape[1] // UNIT_INPUTS
    # Outputs: warp, half of the warp's 16, lane / 4. Columns: the thread's run of 16 bytes,
    # step in the run, half of the step's 16, lane % 4, one of two neighbours.
    runs = 2 if bits == 4 else 4
    whole = integers_EK.view(tiles, 4, 2, 8, units, runs, 8 // runs, 2, 4, 2)
    if bits == 8:
        order = (0, 4, 5, 1, 3, 8, 6, 7, 9, 2)
        return whole.permute(order).reshape(tiles, units, -1)
    nibbles = whole.permute(0, 4, 5, 1, 3, 8, 6, 9, 7, 2)
    packed = nibbles[..., 0] | nibbles[..., 1] << 4
    return packed.reshape(tiles, units, -1)


def _pairs(numbers_ES: Tensor, groups: int) -> Tensor:
    """uint8 [N, C, bytes]: for each group, the numbers of each thread's two outputs."""
    numbers = _padded(numbers_ES, UNIT_OUTPUTS, 1).contiguous()
    tiles = numbers.shape[0] // UNIT_OUTPUTS
    parted = numbers.view(tiles, 4, 2, 8, -1, groups).permute(0, 4, 5, 1, 3, 2)
    return parted.contiguous().view(torch.uint8).reshape(tiles, parted.shape[1], -1)


def _fp4_words(values: Tensor) -> Tensor:
    """uint8 [N, C, bytes]: words of eight codes as ``cuda/csrc/fp4_units.cuh`` takes them."""
    words = values.view(torch.int32).to(torch.int64)
    arranged = torch.zeros_like(words)
    for code in range(8):
        bits, half = words >> 4 * code, code // 4 * 16
        arranged |= (bits >> 3 & 1) << _FP4_SIGNS[code % 4] + half
        arranged |= (bits & 7) << _FP4_BITS[code % 4] + half
    return arranged.to(torch.int32).view(torch.uint8)


def _exponents(scales_ES: Tensor, groups: int) -> Tensor:
    """uint8 [N, C, bytes]: for each thread's two outputs the exponents of the even groups, then
    those of the odd groups."""
    exponents = (scales_ES.view(torch.int32) >> _MANTISSA_BITS) + _FP4_BIAS
    exponents = _padded(exponents.to(torch.uint8), UNIT_OUTPUTS, 1)
    tiles = exponents.shape[0] // UNIT_OUTPUTS
    parted = exponents.view(tiles, 4, 2, 8, -1, groups // 2, 2)
    return parted.permute(0, 4, 1, 3, 2, 6, 5).reshape(tiles, parted.shape[4], -1)
