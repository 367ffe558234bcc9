"""Products in FP8 and INT8 in plain torch: what the fast kernels are compared with.

Values are quantized by a multiplication with the reciprocal of a float32 scale, clamped, and
rounded to the nearest, halves to even. A product adds up float32 products of the quantized
values, multiplies by the scale of the input, then by that of the weight. INT8 inputs are those
of `integer_reference.quantize_inputs`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimaran.kernels.integer_reference import quantize_inputs
from trimaran.kernels.quantized import (
    FP8,
    GROUP,
    INT8,
    LARGEST,
    BlockMap,
    ByteInputs,
    ByteProduct,
    ByteRows,
    ByteWeight,
    Fp8Experts,
)
from trimaran.kernels.reference import silu_and_mul, sum_experts

# Shapes: T tokens, D inner width, E outputs, G groups of inputs; of scales: R rows and C
# columns of blocks.

SMALLEST_PEAK = 1e-10
"""Peaks below count as this, so that zeros have a scale above zero."""

_MANTISSA = 0x007FFFFF
_EXPONENT = 0x7F800000


def scales_of(peaks: Tensor, *, has_powers: bool = False) -> Tensor:
    """Float32 scales by which values up to ``peaks`` use the whole range of e4m3."""
    peaks = peaks.float().clamp_min(SMALLEST_PEAK)
    # The divisor is a tensor: on a GPU torch multiplies by the reciprocal of a plain number
    # instead.
    scales = peaks / torch.full_like(peaks, LARGEST)
    if not has_powers:
        return scales
    # Up to the next power of two, unless the mantissa is zero.
    bits = scales.view(torch.int32) + _MANTISSA
    return (bits & _EXPONENT).view(torch.float32)


def to_fp8(x: Tensor, scales: Tensor) -> Tensor:
    """``x / scales`` as e4m3; ``scales`` broadcast to the shape of ``x``."""
    values = x.float() * scales.reciprocal()
    return values.clamp(-LARGEST, LARGEST).to(FP8)


def quantize_tokens(x_TD: Tensor, inputs: ByteInputs) -> tuple[Tensor, Tensor]:
    """Values [T, D] in the dtype of ``inputs``, and scales: float32 [T, 1], or [] if static and
    in FP8."""
    if inputs.dtype is INT8:
        return quantize_inputs(x_TD, inputs.scale)
    if inputs.scale is not None:
        return to_fp8(x_TD, inputs.scale), inputs.scale
    peaks = x_TD.abs().amax(1, keepdim=True).float()
    if inputs.bound:
        peaks = peaks.clamp_max(inputs.bound)
    scales = scales_of(peaks, has_powers=inputs.has_power_scales)
    return to_fp8(x_TD, scales), scales


def quantize_groups(
    x_TD: Tensor, blocks: BlockMap, inputs: ByteInputs
) -> tuple[Tensor, Tensor]:
    """FP8 values [T, D] and scales float32 [T, G]."""
    groups = blocks.groups(x_TD.shape[1])
    peaks = [x_TD[:, group].abs().amax(1) for group in groups]
    scales_TG = scales_of(torch.stack(peaks, 1), has_powers=inputs.has_power_scales)
    sizes = torch.tensor([each.stop - each.start for each in groups], device=x_TD.device)
    spread_TD = scales_TG.repeat_interleave(sizes, dim=1)
    return to_fp8(x_TD, spread_TD), scales_TG


def quantize_rows(x_TD: Tensor, inputs: ByteInputs) -> ByteRows:
    """Rows with a scale for each group of `GROUP` inputs."""
    rows, width = x_TD.shape
    assert width % GROUP == 0, f"{width} inputs are no whole groups of {GROUP}"
    groups = x_TD.reshape(rows * width // GROUP, GROUP)
    values, scales = quantize_tokens(groups, inputs)
    scales_TG = scales.expand(len(groups), 1).reshape(rows, -1)
    scales_GP = scales_TG.new_zeros(width // GROUP, -(-rows // 8) * 8)
    scales_GP[:, :rows] = scales_TG.T
    return ByteRows(values.view(rows, width), scales_GP, x_TD.dtype)


def multiply_rows(x: ByteRows, weight: ByteWeight) -> Tensor:
    """``x @ weight.T`` [T, E] of rows with groups, in float32."""
    scales_TD = x.scales[:, : len(x.values)].T.repeat_interleave(GROUP, dim=1)
    return (x.values.float() * scales_TD) @ weight.values.float().T * weight.scales


class ReferenceProduct(ByteProduct):
    """`ByteProduct` in torch, on any device."""

    def __init__(self, weight: ByteWeight, inputs: ByteInputs) -> None:
        self._weight = weight
        self._inputs = inputs

    def __call__(self, x_TD: Tensor | ByteRows, bias_E: Tensor | None = None) -> Tensor:
        """See `ByteProduct`."""
        weight = self._weight
        assert isinstance(x_TD, Tensor), "this product makes no quantized rows"
        if weight.blocks is None:
            values_TD, scales_T1 = quantize_tokens(x_TD, self._inputs)
            total_TE = values_TD.float() @ weight.values.float().T
            total_TE = total_TE * scales_T1 * weight.scales
        else:
            total_TE = self._by_blocks(x_TD, weight.blocks)
        if bias_E is not None:
            total_TE = total_TE + bias_E.float()
        return total_TE.to(x_TD.dtype)

    def _by_blocks(self, x_TD: Tensor, blocks: BlockMap) -> Tensor:
        weight = self._weight
        values_TD, scales_TG = quantize_groups(x_TD, blocks, self._inputs)
        total_TE = x_TD.new_zeros(x_TD.shape[0], weight.values.shape[0], dtype=torch.float32)
        for number, group in enumerate(blocks.groups(x_TD.shape[1])):
            part_TE = values_TD[:, group].float() @ weight.values[:, group].float().T
            scales_E = weight.scales[:, number][blocks.rows]
            total_TE += part_TE * scales_TG[:, number, None] * scales_E
        return total_TE


def expert_mlp(
    x_TD: Tensor,
    weights_TC: Tensor,
    ids_TC: Tensor,
    gate_up: Fp8Experts,
    down: Fp8Experts,
    first_expert: int = 0,
) -> Tensor:
    """See `Ops.fp8_expert_mlp`; values are [X, E, D], as stored in checkpoints."""

    def run(expert: int, rows: Tensor) -> Tensor:
        inner = silu_and_mul(ReferenceProduct(*gate_up.of(expert))(rows))
        return ReferenceProduct(*down.of(expert))(inner)

    experts = range(first_expert, first_expert + len(gate_up.values))
    return sum_experts(x_TD, weights_TC, ids_TC, experts, run)


def quantize_weight(
    weight_ED: Tensor, block: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """FP8 values [E, D], and float32 scales: [E], or [R, C] of blocks; the last blocks may be
    smaller.

    Scales are rounded up to bf16 numbers, because some programs store scales in bf16.
    """
    if block is None:
        scales = as_bf16(scales_of(weight_ED.abs().amax(1)))
    else:
        scales = as_bf16(scales_of(split_blocks(weight_ED.abs(), block).amax((1, 3))))
    return to_fp8(weight_ED, spread_scales(scales, tuple(weight_ED.shape), block)), scales


def dequantize_weight(
    values_ED: Tensor, scales: Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> Tensor:
    """The weight [E, D], rounded once. ``scales`` have one element, [E] or [E, 1], or
    [R, C]."""
    outputs, inner = values_ED.shape
    if block is not None:
        scales = spread_scales(scales.float(), (outputs, inner), block)
    elif scales.numel() > 1:
        scales = scales.reshape(outputs, 1)
    else:
        scales = scales.reshape(())
    return (values_ED.float() * scales.float()).to(dtype)


def spread_scales(
    scales: Tensor, shape: tuple[int, ...], block: tuple[int, int] | None
) -> Tensor:
    """The scales [E] of rows, or [R, C] of blocks, for each value of a weight [E, D]."""
    if block is None:
        return scales[:, None].expand(shape)
    rows, columns = block
    spread = scales.repeat_interleave(rows, 0)[: shape[0]]
    return spread.repeat_interleave(columns, 1)[:, : shape[1]]


def as_bf16(scales: Tensor) -> Tensor:
    """The smallest bf16 numbers at or above ``scales``, as float32; for positive scales."""
    return ((scales.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def split_blocks(x_ED: Tensor, block: tuple[int, int]) -> Tensor:
    """``x`` as [R, rows, C, columns]; zeros fill the last blocks."""
    (outputs, inner), (rows, columns) = x_ED.shape, block
    whole = torch.nn.functional.pad(x_ED, (0, -inner % columns, 0, -outputs % rows))
    return whole.view(whole.shape[0] // rows, rows, whole.shape[1] // columns, columns)
