"""Products by integer weights in plain torch: what the fast kernels are compared with.

Weights are dequantized in float32. Inputs of signed bytes are rounded to the nearest, halves to
even, with a float32 scale a token, 1/127 of the largest magnitude, or with the weight's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.kernels.integers import FP4_NUMBERS, Groups, IntegerExperts, IntegerWeight
from trimaran.kernels.reference import clamped_swiglu, silu_and_mul, sum_experts
from trimaran.kernels.routing import ExpertForm

# Shapes: T tokens, D inner width, E outputs, G groups of inputs, X experts, C experts of a
# token.

LARGEST_INPUT = 127
_SMALLEST_PEAK = 1e-10
"""Peaks below count as this, so that zeros have a scale above zero."""

_NIBBLE = 15
_MANTISSA_BITS = 23
_LEAST_POWER = 2.0**-127
_NAN_EXPONENT = 255


def pack(integers_ED: Tensor, bits: int) -> Tensor:
    """uint8 [E, D] as `IntegerWeight` holds them."""
    if bits == 8:
        return integers_ED.contiguous()
    return integers_ED[:, ::2] | integers_ED[:, 1::2] << 4


def unpack(values: Tensor, bits: int) -> Tensor:
    """uint8 [E, D]: the inverse of `pack`."""
    if bits == 8:
        return values
    return torch.stack((values & _NIBBLE, values >> 4), 2).flatten(1)


def powers_of_two(exponents: Tensor) -> Tensor:
    """float32: the numbers of E8M0 exponents, uint8 biased by 127; 255 is NaN."""
    # The bits of float32, whose exponent 0 stands for subnormal numbers.
    normal = (exponents.to(torch.int32) << _MANTISSA_BITS).view(torch.float32)
    floats = torch.where(exponents == 0, torch.full_like(normal, _LEAST_POWER), normal)
    return floats.masked_fill(exponents == _NAN_EXPONENT, torch.nan)


def dequantize(weight: IntegerWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [E, D], rounded once from float32."""
    integers_ED = unpack(weight.values, weight.bits)
    numbers = weight.groups.numbers(integers_ED.shape[1], integers_ED.device)
    scales_ED = weight.scales[:, numbers]
    if weight.is_fp4:
        table = torch.tensor(FP4_NUMBERS, device=integers_ED.device)
        return (table[integers_ED.long()] * scales_ED).to(dtype)
    if weight.minimums is not None:
        floats = integers_ED.float() * scales_ED + weight.minimums[:, numbers]
        return floats.to(dtype)
    zeros: Tensor | int = weight.half
    if weight.zeros is not None:
        zeros = weight.zeros[:, numbers]
    return ((integers_ED.to(torch.int16) - zeros).float() * scales_ED).to(dtype)


def quantize_inputs(x_TD: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """int8 values [T, D], and float32 scales [T, 1]; or ``scale`` [] for all tokens, by which
    larger inputs are clamped."""
    peaks_T1 = x_TD.abs().amax(1, keepdim=True).float()
    if scale is None:
        peaks_T1 = peaks_T1.clamp_min(_SMALLEST_PEAK)
        scales_T1 = peaks_T1 / torch.full_like(peaks_T1, LARGEST_INPUT)
    else:
        # A token whose inputs are no numbers has no scale: bytes would hide these inputs.
        scales_T1 = scale + 0.0 * peaks_T1
    values = (x_TD.float() * scales_T1.reciprocal()).round()
    return values.clamp(-LARGEST_INPUT, LARGEST_INPUT).to(torch.int8), scales_T1


class ReferenceIntegerProduct:
    """`IntegerProduct` in torch, on any device."""

    def __init__(self, weight: IntegerWeight, *, has_byte_inputs: bool) -> None:
        self._weight = weight
        self._has_byte_inputs = has_byte_inputs

    @property
    def nbytes(self) -> int:
        """See `IntegerProduct`."""
        weight = self._weight
        parts = (weight.values, weight.scales, weight.zeros, weight.minimums)
        return sum(each.nbytes for each in parts if each is not None)

    def __call__(
        self, x_TD: Tensor, bias_E: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `IntegerProduct`."""
        weight_ED = dequantize(self._weight)
        if self._has_byte_inputs:
            values, scales_T1 = quantize_inputs(x_TD, self._weight.input_scale)
            total_TE = values.float() @ weight_ED.T * scales_T1
        else:
            total_TE = x_TD.float() @ weight_ED.T
        if bias_E is not None:
            total_TE = total_TE + bias_E.float()
        return total_TE.to(dtype or x_TD.dtype)

    def gated(self, x_TD: Tensor) -> Tensor | None:
        """See `IntegerProduct`: SwiGLU is a kernel of its own."""
        return None


def expert_storage(weights: Sequence[IntegerWeight]) -> IntegerExperts:
    """See `Ops.integer_expert_storage`: values [X, E, D] or [X, E, D / 2], float32 scales
    [X, E, G], int16 zeros [X, E, G] and the group of each input [X, D]."""
    inner = weights[0].shape[1]
    numbers = [each.groups.numbers(inner, each.values.device).int() for each in weights]
    return IntegerExperts(
        torch.stack([each.values for each in weights]),
        torch.stack([each.scales for each in weights]),
        stacked_zeros(weights),
        torch.stack(numbers),
        None,
        weights[0].bits,
        is_fp4=weights[0].is_fp4,
    )


def stacked_zeros(weights: Sequence[IntegerWeight]) -> Tensor | None:
    """int16 [X, E, G]; None if half of the range stands for zero everywhere."""
    if all(each.zeros is None for each in weights):
        return None
    return torch.stack(
        [
            torch.full_like(each.scales, each.half, dtype=torch.int16)
            if each.zeros is None
            else each.zeros
            for each in weights
        ]
    )


def expert_mlp(
    x_TD: Tensor,
    weights_TC: Tensor,
    ids_TC: Tensor,
    gate_up: IntegerExperts,
    down: IntegerExperts,
    first_expert: int = 0,
    form: ExpertForm | None = None,
) -> Tensor:
    """See `Ops.integer_expert_mlp`; the experts are those of `expert_storage`."""

    def product(experts: IntegerExperts, number: int) -> ReferenceIntegerProduct:
        assert experts.scales is not None and experts.groups is not None
        weight = IntegerWeight(
            experts.values[number],
            experts.scales[number],
            Groups(1, of_inputs=experts.groups[number]),
            experts.bits,
            None if experts.zeros is None else experts.zeros[number],
            is_fp4=experts.is_fp4,
        )
        return ReferenceIntegerProduct(weight, has_byte_inputs=False)

    def run(expert: int, rows: Tensor) -> Tensor:
        if form is None:
            return product(down, expert)(silu_and_mul(product(gate_up, expert)(rows)))
        both = product(gate_up, expert)(rows, form.gate_up_bias[expert])
        inner = clamped_swiglu(both, form.alpha, form.limit)
        return product(down, expert)(inner, form.down_bias[expert])

    experts = range(first_expert, first_expert + len(gate_up.values))
    return sum_experts(x_TD, weights_TC, ids_TC, experts, run)


def quantize_weight(
    weight_ED: Tensor, bits: int, group_size: int | None
) -> tuple[Tensor, Tensor]:
    """Unsigned integers uint8 [E, D] and float32 scales [E, G], symmetric around half of the
    range; the last group may be smaller.

    Scales are bf16 numbers, because checkpoints store them so.
    """
    outputs, inner = weight_ED.shape
    size = group_size or inner
    half = 1 << (bits - 1)
    floats = torch.nn.functional.pad(weight_ED.float(), (0, -inner % size))
    grouped = floats.view(outputs, -1, size)
    # The largest magnitude becomes the least integer, whose magnitude is one more than that of
    # the greatest: a finer scale.
    peaks = grouped.gather(2, grouped.abs().argmax(2, keepdim=True)) if bits == 4 else None
    if peaks is None:
        scales = grouped.abs().amax(2, keepdim=True) / (half - 1)
    else:
        scales = peaks / -half
    tiny = torch.finfo(torch.bfloat16).tiny
    scales = torch.where(scales.abs() < tiny, tiny, scales).to(torch.bfloat16).float()
    integers = (grouped / scales).round().clamp(-half, half - 1) + half
    return integers.to(torch.uint8).view(outputs, -1)[:, :inner], scales.squeeze(2)


def regular_groups(groups: Groups, inner: int) -> Groups:
    """``groups`` without the list of their inputs, if their inputs are consecutive."""
    if groups.of_inputs is None:
        return groups
    plain = groups._replace(of_inputs=None)
    expected = plain.numbers(inner, groups.of_inputs.device)
    return plain if bool((groups.of_inputs == expected).all()) else groups
