"""FP8 products on a CPU: bf16 kernels on the same numbers, which bf16 holds exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from trimaran.kernels.cpu.kernel import DTYPE_CODES, Kernel
from trimaran.kernels.fp8_reference import quantize_groups, quantize_tokens
from trimaran.kernels.quantized import BlockMap, Fp8Inputs, Fp8Weight

# Shapes: T tokens, D inner width, E outputs, W inputs of a block.

_BF16 = torch.bfloat16


class CpuFp8Product:
    """`Fp8Product` by the C++ product; a token's result is independent of other tokens.

    The weight is stored in bf16 (twice the bytes of FP8), with one contiguous matrix for each
    column of blocks.
    """

    def __init__(self, linear: Kernel, weight: Fp8Weight, inputs: Fp8Inputs) -> None:
        self._linear = linear
        self._inputs = inputs
        self._blocks = weight.blocks
        self._scales = weight.scales
        self._outputs = weight.values.shape[0]
        values_ED = weight.values
        if self._blocks is None:
            self._parts = [values_ED.to(_BF16)]
            return
        groups = self._blocks.groups(values_ED.shape[1])
        self._parts = [values_ED[:, group].to(_BF16).contiguous() for group in groups]

    def __call__(self, x_TD: Tensor, bias_E: Tensor | None = None) -> Tensor:
        """See `Fp8Product`."""
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
