"""Products by integer weights on a CPU, in the order of the C++ kernel's blocks."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from trimaran.kernels.cpu.kernel import DTYPE_CODES, Kernel
from trimaran.kernels.integer_reference import unpack
from trimaran.kernels.integers import IntegerWeight

# Shapes: T tokens, D inner width, E outputs, G groups of inputs, K columns with padding.

_BLOCK = 16
_STEP = 4
_MAX_SEGMENT = 128
"""Columns whose inputs share a scale: few, so that a large input spoils few small ones."""

_BYTE_HALF = 128
_FP4_UNIT = 0.5
"""The kernel's integers of FP4 numbers count halves."""


class CpuIntegerWeight(NamedTuple):
    """A weight in the order of the C++ kernel's blocks."""

    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    order: Tensor | None
    segments: Tensor
    numbers: tuple[int, ...]
    """Bits, columns, segments, groups, outputs and whether numbers are FP4, as the kernel's
    description has them behind the addresses of the tensors."""

    @classmethod
    def of(cls, weight: IntegerWeight) -> CpuIntegerWeight:
        """The blocks of a weight."""
        outputs, inner = weight.shape
        columns, segments = _segments(weight, inner)
        is_in_order = columns == list(range(inner))
        order = torch.tensor(columns, dtype=torch.int32)
        offsets = _offsets(weight)
        return cls(
            _blocked_values(weight, order.long()),
            _blocked(weight.scales * _FP4_UNIT if weight.is_fp4 else weight.scales),
            None if offsets is None else _blocked(offsets),
            None if is_in_order else order,
            torch.tensor(segments, dtype=torch.int32),
            (
                weight.bits,
                len(columns),
                len(segments),
                weight.scales.shape[1],
                outputs,
                int(weight.is_fp4),
            ),
        )

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors in the order of the kernel's description."""
        return self[:5]


DESCRIPTION = "=12qd"
"""The kernels' description of a weight: addresses of its tensors, its numbers, whether inputs
are bytes, and the scale of these, or 0."""


class CpuIntegerProduct:
    """`IntegerProduct` by the C++ kernel; a token's result is independent of other tokens."""

    def __init__(self, linear: Kernel, weight: IntegerWeight, *, has_byte_inputs: bool) -> None:
        self._linear = linear
        self._outputs = weight.shape[0]
        self._weight = CpuIntegerWeight.of(weight)
        addresses = [_address(each) for each in self._weight.tensors]
        scale = 0.0 if weight.input_scale is None else float(weight.input_scale)
        numbers = struct.pack(
            DESCRIPTION, *addresses, *self._weight.numbers, has_byte_inputs, scale
        )
        self._struct = ctypes.create_string_buffer(numbers)

    @property
    def address(self) -> int:
        """The kernels' description of the weight, valid as long as this object."""
        return ctypes.addressof(self._struct)

    @property
    def nbytes(self) -> int:
        """Memory of the weight."""
        others = self._weight[:3]
        return sum(each.nbytes for each in others if each is not None)

    def __call__(
        self, x_TD: Tensor, bias_E: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `IntegerProduct`; ``dtype`` is that of ``x``, or float32."""
        y_TE = torch.empty((x_TD.shape[0], self._outputs), dtype=dtype or x_TD.dtype)
        multiply(self._linear, x_TD, self.address, bias_E, y_TE)
        return y_TE

    def gated(self, x_TD: Tensor) -> Tensor | None:
        """See `IntegerProduct`: SwiGLU is a kernel of its own."""
        return None


def multiply(
    linear: Kernel, x_TD: Tensor, description: int, bias_E: Tensor | None, y_TE: Tensor
) -> None:
    """Write ``x @ weight.T + bias`` to ``y``; ``description`` is an address."""
    linear(
        DTYPE_CODES[x_TD.dtype], y_TE.dtype is torch.float32, x_TD.data_ptr(), description,
        _address(bias_E), y_TE.data_ptr(), x_TD.shape[0], x_TD.stride(0),
    )  # fmt: skip


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _segments(weight: IntegerWeight, inner: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """The input of each column, -1 for padding, and the segments: their first column, number of
    columns and group."""
    groups = weight.groups.numbers(inner, torch.device("cpu"))
    # Inputs of a group keep their order, so that results do not depend on how ranks cut them.
    order = torch.argsort(groups, stable=True)
    numbers, counts = torch.unique_consecutive(groups[order], return_counts=True)
    columns: list[int] = []
    segments: list[tuple[int, ...]] = []
    start = 0
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        inputs = order[start : start + count].tolist()
        start += count
        for first in range(0, count, _MAX_SEGMENT):
            mine = inputs[first : first + _MAX_SEGMENT]
            padded = mine + [-1] * (-len(mine) % _STEP)
            segments.append((len(columns), len(padded), number))
            columns += padded
    return columns, segments


def _blocked_values(weight: IntegerWeight, order_K: Tensor) -> Tensor:
    """The integers as the kernel reads them."""
    integers_ED = unpack(weight.values, weight.bits)
    outputs = integers_ED.shape[0]
    columns = order_K.numel()
    if not torch.equal(order_K, torch.arange(integers_ED.shape[1])):
        integers_ED = integers_ED[:, order_K.clamp_min(0)]
    missing = -outputs % _BLOCK
    if missing:
        integers_ED = torch.nn.functional.pad(integers_ED, (0, 0, 0, missing))
    if weight.bits == 8:
        pairs = (integers_ED ^ _BYTE_HALF).view(-1, _BLOCK, columns // 2, 2)
        return pairs.permute(0, 2, 1, 3).contiguous()
    fours = integers_ED.view(-1, _BLOCK, columns // _STEP, 2, 2)
    packed = fours[:, :, :, 0] | fours[:, :, :, 1] << 4
    return packed.permute(0, 2, 1, 3).contiguous()


def _offsets(weight: IntegerWeight) -> Tensor | None:
    """float32 [E, G] added to the kernel's integer times scale; None if nothing is."""
    # The kernel's bytes are less by half.
    half = _BYTE_HALF if weight.bits == 8 else 0
    if weight.minimums is not None:
        return weight.minimums + weight.scales * half
    if weight.zeros is None or weight.is_fp4:
        return None
    return weight.scales * (half - weight.zeros)


def _blocked(numbers_EG: Tensor) -> Tensor:
    """[blocks, G, 16]."""
    padded = torch.nn.functional.pad(numbers_EG, (0, 0, 0, -numbers_EG.shape[0] % _BLOCK))
    return padded.view(-1, _BLOCK, numbers_EG.shape[1]).transpose(1, 2).contiguous()
