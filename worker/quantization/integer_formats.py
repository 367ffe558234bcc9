"""The tensors in which checkpoints hold integer weights, unpacked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trimaran.kernels.integer_reference import (
    dequantize,
    pack,
    powers_of_two,
    quantize_weight,
    unpack,
)
from trimaran.kernels.integers import Groups, IntegerWeight
from trimaran.worker.config.schemes import IntegerScheme, Layout
from trimaran.worker.quantization.fp8_linear import INPUT_SCALE, scale_prefix

# Shapes: D inner width, E outputs, G groups of inputs.

WEIGHT = "weight"
WEIGHT_SCALE = "weight_scale"
WEIGHT_ZERO = "weight_zero"
WEIGHT_MINIMUM = "weight_minimum"
WEIGHT_GROUP = "weight_group"
WEIGHT_GLOBAL = "weight_global"
"""The common factor of all scales, which no parameter holds."""

_KINDS = (WEIGHT_SCALE, WEIGHT_ZERO, WEIGHT_MINIMUM, WEIGHT_GROUP, INPUT_SCALE)

_WORD_BITS = 32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight consecutive outputs."""


def kind_of(parameter: str) -> str:
    """What a parameter of integers holds: `WEIGHT` or what belongs to a weight."""
    return next((kind for kind in _KINDS if parameter.endswith(kind)), WEIGHT)


def parameter_name(weight: str, kind: str) -> str:
    """The parameter of a kind beside the parameter ``weight``: a linear layer's ``x.weight``,
    or the stacked matrices of experts."""
    return weight if kind == WEIGHT else scale_prefix(weight) + kind


def unpacked(scheme: IntegerScheme, name: str, tensor: Tensor) -> Tensor:
    """A whole tensor of a checkpoint as a parameter of the kind ``name`` takes it.

    uint8 [E, D] of integers, float32 [E, G] of scales or uint8 of their exponents, int16 [E, G]
    of zero points, int32 [D] of the inputs' groups, or float32 [] or [1] of the inputs' scale.
    Packed tensors may have values of
    padding at the end.
    """
    if scheme.layout is Layout.GGUF:
        # The file's reader takes blocks apart.
        return tensor.to(torch.uint8) if name == WEIGHT else tensor.float()
    if scheme.layout is Layout.MXFP4:
        # [E, G, 16]: two codes a byte, the first in the low half.
        return unpack(tensor.flatten(1), scheme.bits) if name == WEIGHT else tensor
    if scheme.has_global_scale:
        return unpack(tensor, scheme.bits) if name == WEIGHT else tensor.float()
    if name == WEIGHT:
        return _integers(scheme, tensor)
    if name == WEIGHT_SCALE:
        return _scales(scheme, tensor)
    if name == WEIGHT_ZERO:
        return _zeros(scheme, tensor)
    return tensor.float() if name == INPUT_SCALE else tensor.to(torch.int32)


def with_global_scale(scheme: IntegerScheme, scales: Tensor, factor: Tensor) -> Tensor:
    """float32 scales of FP8 numbers and their common factor, or divisor, of one number."""
    is_factor = scheme.layout is Layout.NVFP4
    floats, factor = scales.float(), factor.float().reshape(())
    return floats * factor if is_factor else floats / factor


def dequantized(
    scheme: IntegerScheme, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """The floats [E, D] of a checkpoint's tensors, by the names of their parameters."""
    tensors = dict(tensors)
    if scheme.has_global_scale:
        factor = tensors.pop(WEIGHT_GLOBAL)
        tensors[WEIGHT_SCALE] = with_global_scale(scheme, tensors[WEIGHT_SCALE], factor)
    parts = {name: unpacked(scheme, name, tensor) for name, tensor in tensors.items()}
    integers = parts[WEIGHT]
    outputs, inner = parts[WEIGHT_SCALE].shape[0], integers.shape[1]
    order = parts.get(WEIGHT_GROUP)
    zeros = parts.get(WEIGHT_ZERO)
    scales = parts[WEIGHT_SCALE]
    weight = IntegerWeight(
        pack(integers[:outputs], scheme.bits),
        powers_of_two(scales) if scheme.has_power_scales else scales,
        Groups(scheme.group_size or inner, of_inputs=order),
        scheme.bits,
        None if zeros is None else zeros[:outputs],
        is_fp4=scheme.is_fp4,
    )
    return dequantize(weight, dtype)


def _integers(scheme: IntegerScheme, tensor: Tensor) -> Tensor:
    bits, half = scheme.bits, 1 << (scheme.bits - 1)
    if scheme.layout is Layout.AWQ:
        return _split_words(tensor, bits, _AWQ_ORDER).t()
    if scheme.layout in (Layout.GPTQ, Layout.GPTQ_V2):
        return _split_words(tensor.t(), bits)
    if scheme.layout is Layout.PACKED:
        return _split_words(tensor, bits)
    return (tensor.to(torch.int16) + half).to(torch.uint8)


def _scales(scheme: IntegerScheme, tensor: Tensor) -> Tensor:
    if scheme.layout in (Layout.AWQ, Layout.GPTQ, Layout.GPTQ_V2):
        tensor = tensor.t()
    floats = tensor.float()
    return floats.reshape(-1, 1) if floats.dim() < 2 else floats


def _zeros(scheme: IntegerScheme, tensor: Tensor) -> Tensor:
    bits, half = scheme.bits, 1 << (scheme.bits - 1)
    if scheme.layout is Layout.AWQ:
        return _split_words(tensor, bits, _AWQ_ORDER).t().to(torch.int16)
    if scheme.layout in (Layout.GPTQ, Layout.GPTQ_V2):
        less = int(scheme.layout is Layout.GPTQ)
        return _split_words(tensor, bits).t().to(torch.int16) + less
    # A zero point of a whole matrix is not packed.
    if scheme.layout is Layout.PACKED and tensor.dtype is torch.int32:
        return _split_words(tensor.t(), bits).t().to(torch.int16)
    zeros = tensor.to(torch.int16) + half
    return zeros.reshape(-1, 1) if zeros.dim() < 2 else zeros


def _split_words(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """uint8: the integers of int32 words along the last dim, the lowest bits first."""
    places = order or tuple(range(_WORD_BITS // bits))
    mask = (1 << bits) - 1
    parts = [(words >> bits * place & mask).to(torch.uint8) for place in places]
    return torch.stack(parts, -1).flatten(-2)


def from_floats(scheme: IntegerScheme, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    """The integers and scales of a float weight, as the parameters take them."""
    return quantize_weight(weight_ED, scheme.bits, scheme.group_size)
