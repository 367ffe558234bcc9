"""FP8 products on a CPU: bf16 kernels on the same numbers, which bf16 holds exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.kernels.byte_reference import quantize_groups, quantize_tokens
from trimaran.kernels.cpu.kernel import DTYPE_CODES, Kernel
from trimaran.kernels.quantized import BlockMap, ByteInputs, ByteProduct, ByteRows, ByteWeight

# Shapes: T tokens, D inner width, E outputs, W inputs of a block.

_BF16 = torch.bfloat16


def pack(values_ED: Tensor, blocks: BlockMap | None) -> Tensor:
    """FP8 values in bf16 (twice the bytes), as `CpuFp8Product` reads them.

    With blocks the memory holds one contiguous matrix for each column of blocks.
    """
    if blocks is None:
        return values_ED.to(_BF16)
    packed_ED = torch.empty(values_ED.shape, dtype=_BF16)
    groups = blocks.groups(values_ED.shape[1])
    for group, part in zip(groups, _parts(packed_ED, blocks), strict=True):
        part.copy_(values_ED[:, group])
    return packed_ED


def _parts(packed_ED: Tensor, blocks: BlockMap | None) -> Sequence[Tensor]:
    """The matrices [E, W] that a packed weight consists of."""
    if blocks is None:
        return [packed_ED]
    outputs, inner = packed_ED.shape
    widths = [group.stop - group.start for group in blocks.groups(inner)]
    parts = torch.split(packed_ED.view(-1), [outputs * width for width in widths])
    return [part.view(outputs, width) for part, width in zip(parts, widths, strict=True)]


class CpuFp8Product(ByteProduct):
    """`ByteProduct` by the C++ product; a token's result is independent of other tokens."""

    def __init__(self, linear: Kernel, packed: ByteWeight, inputs: ByteInputs) -> None:
        """The values of ``packed`` are those of `pack`."""
        self._linear = linear
        self._inputs = inputs
        self._blocks = packed.blocks
        self._scales = packed.scales
        self._outputs = packed.values.shape[0]
        self._parts = _parts(packed.values, packed.blocks)

    def __call__(self, x_TD: Tensor | ByteRows, bias_E: Tensor | None = None) -> Tensor:
        """See `ByteProduct`."""
        assert isinstance(x_TD, Tensor), "this product makes no quantized rows"
        if self._blocks is None:
            values_TD, scales_T1 = quantize_tokens(x_TD, self._inputs)
            total_TE = self._multiply(values_TD.to(_BF16), self._parts[0])
            total_TE.mul_(scales_T1).mul_(self._scales)
        else:
            total_TE = self._by_blocks(x_TD, self._blocks)
        if bias_E is not None:
            total_TE.add_(bias_E)
        return total_TE.to(x_TD.dtype)

    def _by_blocks(self, x_TD: Tensor, blocks: BlockMap) -> Tensor:
        values_TD, scales_TG = quantize_groups(x_TD, blocks, self._inputs)
        values_TD = values_TD.to(_BF16)
        total_TE = torch.zeros((x_TD.shape[0], self._outputs))
        for number, group in enumerate(blocks.groups(x_TD.shape[1])):
            part_TE = self._multiply(values_TD[:, group], self._parts[number])
            part_TE.mul_(scales_TG[:, number, None])
            total_TE.add_(part_TE.mul_(self._scales[:, number][blocks.rows]))
        return total_TE

    def _multiply(self, x_TW: Tensor, weight_EW: Tensor) -> Tensor:
        """Float32 sums [T, E]."""
        rows, width = x_TW.shape
        y_TE = torch.empty((rows, self._outputs))
        self._linear(
            DTYPE_CODES[_BF16], True, x_TW.data_ptr(), weight_EW.data_ptr(), 0, y_TE.data_ptr(),
            rows, width, self._outputs, x_TW.stride(0),
        )  # fmt: skip
        return y_TE
