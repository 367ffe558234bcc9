"""What of a checkpoint fills each parameter of a rank, quantized or dequantized on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.kernels.byte_reference import dequantize_weight, quantize_weight
from trimaran.worker.config.schemes import Fp8Scheme, IntegerScheme, Layout, Zeros
from trimaran.worker.models.interfaces import CausalLM, OutputSlice, WeightTarget
from trimaran.worker.models.quantized_layers import (
    Fp8Method,
    IntegerMethod,
    quantized_method_of,
    scheme_of_key,
)
from trimaran.worker.models.weights.checkpoint import (
    FP8_WORD,
    INTEGER_WORDS,
    POWER_WORD,
    StoredTensor,
    part_key,
)
from trimaran.worker.models.weights.gguf_tensors import INTEGERS, MINIMUMS, SCALES
from trimaran.worker.quantization.fp8_linear import INPUT_SCALE, WEIGHT_SCALE, scale_prefix
from trimaran.worker.quantization.integer_formats import (
    WEIGHT,
    WEIGHT_GLOBAL,
    WEIGHT_GROUP,
    WEIGHT_MINIMUM,
    WEIGHT_ZERO,
    dequantized,
    from_floats,
    kind_of,
    parameter_name,
    unpacked,
    with_global_scale,
)


class Conversion(Enum):
    """What becomes of a stored tensor before it is cut for ranks."""

    NONE = "as stored"
    DEQUANTIZED = "values times scales"
    VALUES = "FP8 values of floats"
    SCALES = "scales of floats"
    UNPACKED = "integers, scales, zero points or order of a format"
    INTEGERS = "integers or scales of floats"
    DEQUANTIZED_INTEGERS = "the floats of integers"


QuantizedFloats = dict[
    tuple[IntegerScheme | tuple[int, int] | None, OutputSlice | None], tuple[Tensor, Tensor]
]
"""Values and scales of the matrices of one tensor of floats, by their scheme or by blocks of
FP8."""


@dataclass(frozen=True, slots=True)
class Part:
    """A whole tensor of the checkpoint that fills a parameter, or a part of it."""

    stored: StoredTensor
    target: WeightTarget
    conversion: Conversion = Conversion.NONE
    scales: StoredTensor | None = None
    """The scales of a tensor that is dequantized."""

    block: tuple[int, int] | None = None
    """Rows and columns that share a scale."""

    scheme: IntegerScheme | None = None
    """The scheme of integers."""

    others: tuple[tuple[str, StoredTensor], ...] = ()
    """Names and tensors that belong to integers that are dequantized, or the common factor of
    scales."""

    def whole(
        self,
        tensor: Tensor,
        read: Callable[[StoredTensor], Tensor],
        dtype: torch.dtype,
        quantized: QuantizedFloats | None = None,
    ) -> Tensor:
        """What is cut for ranks: ``tensor``, as stored, or converted.

        ``read`` gives the scales, and ``dtype`` is that of the parameter. ``quantized`` holds
        what was made of this tensor for other parts.
        """
        quantized = {} if quantized is None else quantized
        tensor = self.target.of(tensor)
        if self.conversion is Conversion.NONE:
            return tensor
        if self.scheme is not None:
            return self._of_integers(self.scheme, tensor, read, dtype, quantized)
        if self.conversion is Conversion.DEQUANTIZED:
            assert self.scales is not None
            return dequantize_weight(tensor, read(self.scales), self.block, dtype)
        key = self.block, self.target.slice
        if key not in quantized:
            weight = tensor.t() if self.target.is_transposed else tensor
            quantized[key] = quantize_weight(weight, self.block)
        values, scales = quantized[key]
        made = values if self.conversion is Conversion.VALUES else scales
        return made.t() if self.target.is_transposed and made.dim() > 1 else made

    def _of_integers(
        self,
        scheme: IntegerScheme,
        tensor: Tensor,
        read: Callable[[StoredTensor], Tensor],
        dtype: torch.dtype,
        quantized: QuantizedFloats,
    ) -> Tensor:
        name = kind_of(self.target.parameter)
        if self.conversion is Conversion.UNPACKED:
            for _, factor in self.others:
                tensor = with_global_scale(scheme, tensor, read(factor))
            return unpacked(scheme, name, tensor)
        if self.conversion is Conversion.DEQUANTIZED_INTEGERS:
            tensors = {other: self.target.of(read(stored)) for other, stored in self.others}
            return dequantized(scheme, {WEIGHT: tensor, **tensors}, dtype)
        key = scheme, self.target.slice
        if key not in quantized:
            weight = tensor.t() if self.target.is_transposed else tensor
            quantized[key] = from_floats(scheme, weight)
        integers, scales = quantized[key]
        made = integers if name == WEIGHT else scales
        return made.t() if self.target.is_transposed else made


def parts_of(model: CausalLM, found: Mapping[str, StoredTensor]) -> list[Part]:
    """The parts of this rank's parameters, given the tensors by their names.

    Raises:
        ConfigError: a tensor is quantized though the configuration does not say so, or the
            other way round; or scales are missing.
    """
    parameters = {name for name, _ in model.named_parameters()}
    parts: list[Part] = []
    weights = model.checkpoint_weights()
    # In the files' order, in which they are read.
    for key in found:
        for target in weights.get(key, ()):
            if target.parameter in parameters:
                parts += _parts(model, found, key, target)
    return parts


def _parts(
    model: CausalLM, found: Mapping[str, StoredTensor], key: str, target: WeightTarget
) -> Iterator[Part]:
    stored = found[key]
    method = quantized_method_of(model, target.parameter)
    scheme = scheme_of_key(model, key)
    if isinstance(method, IntegerMethod):
        yield from _integer_parts(model, found, key, target, method.scheme)
    elif method is not None:
        yield from _quantized_parts(model, found, key, target, method)
    elif isinstance(scheme, IntegerScheme) and stored.entry.dtype in INTEGER_WORDS:
        others = tuple(_others_of(found, key, scheme))
        yield Part(
            stored,
            replace(target, is_transposed=False),
            Conversion.DEQUANTIZED_INTEGERS,
            scheme=scheme,
            others=others,
        )
    elif stored.entry.dtype in (FP8_WORD, POWER_WORD, *INTEGER_WORDS):
        if not isinstance(scheme, Fp8Scheme) or stored.entry.dtype != FP8_WORD:
            raise ConfigError(
                f"{stored.path}: the tensor {stored.name!r} holds {stored.entry.dtype}, but "
                "config.json does not describe such numbers. Use the weights and the "
                "configuration of one model."
            )
        scales = _found(found, stored, f"{key}_scale")
        yield Part(stored, target, Conversion.DEQUANTIZED, scales, scheme.block)
    else:
        yield Part(stored, target)


def _quantized_parts(
    model: CausalLM,
    found: Mapping[str, StoredTensor],
    key: str,
    target: WeightTarget,
    method: Fp8Method,
) -> Iterator[Part]:
    """The parts of a quantized weight and of its scales."""
    stored, block = found[key], method.scheme.block
    layer = scale_prefix(target.parameter)
    scales = replace(target, parameter=layer + WEIGHT_SCALE)
    if stored.entry.dtype != FP8_WORD:
        quantization = model.context.quantization
        if quantization is None or not quantization.quantizes_at_load:
            raise ConfigError(
                f"{stored.path}: the tensor {stored.name!r} holds {stored.entry.dtype}, but "
                "config.json says that it is quantized to FP8. Use the weights and the "
                "configuration of one model."
            )
        yield Part(stored, target, Conversion.VALUES, block=block)
        yield Part(stored, scales, Conversion.SCALES, block=block)
        return
    if target.is_transposed:
        raise ConfigError(
            f"{stored.path}: the tensor {stored.name!r} holds FP8 as [in, out], which is not "
            "served. Name the checkpoint in bfloat16, float16 or float32."
        )
    yield Part(stored, target)
    yield Part(_found(found, stored, f"{key}_scale"), scales)
    if method.has_input_scale:
        source = _found(found, stored, f"{key.removesuffix('weight')}{INPUT_SCALE}")
        yield Part(source, WeightTarget(layer + INPUT_SCALE, target.shard))


def _integer_parts(
    model: CausalLM,
    found: Mapping[str, StoredTensor],
    key: str,
    target: WeightTarget,
    scheme: IntegerScheme,
) -> Iterator[Part]:
    """The parts of a weight of integers, and of its scales, zero points and order."""
    stored, weight = found[key], target.parameter
    if scheme.layout is Layout.GGUF:
        yield from _gguf_parts(stored, target, scheme)
        return
    quantization = model.context.quantization
    if quantization is not None and quantization.quantizes_at_load:
        for name in (WEIGHT, WEIGHT_SCALE):
            own = parameter_name(weight, name)
            made = replace(target, parameter=own)
            yield Part(stored, made, Conversion.INTEGERS, scheme=scheme)
        return
    if stored.entry.dtype not in INTEGER_WORDS:
        raise ConfigError(
            f"{stored.path}: the tensor {stored.name!r} holds {stored.entry.dtype}, but "
            f"config.json says that it is quantized to {scheme.bits} bits. Use the weights and "
            "the configuration of one model."
        )
    if target.is_transposed and scheme.layout in (Layout.PACKED, Layout.PLAIN):
        raise ConfigError(
            f"{stored.path}: the tensor {stored.name!r} holds integers as [in, out], which is "
            "not served. Name the checkpoint in bfloat16, float16 or float32."
        )
    sources = {WEIGHT: stored, **dict(_others_of(found, key, scheme))}
    factor = sources.pop(WEIGHT_GLOBAL, None)
    for name, source in sources.items():
        made = replace(target, parameter=parameter_name(weight, name), is_transposed=False)
        others: tuple[tuple[str, StoredTensor], ...] = ()
        if factor is not None and name == WEIGHT_SCALE:
            others = ((WEIGHT_GLOBAL, factor),)
        yield Part(source, made, Conversion.UNPACKED, scheme=scheme, others=others)
    if scheme.has_input_scale:
        source = _found(found, stored, part_key(key, INPUT_SCALE))
        scale = WeightTarget(parameter_name(weight, INPUT_SCALE), target.shard)
        yield Part(source, scale, Conversion.UNPACKED, scheme=scheme)


def _gguf_parts(
    stored: StoredTensor, target: WeightTarget, scheme: IntegerScheme
) -> Iterator[Part]:
    """The parts of a matrix whose integers and scales lie in blocks."""
    assert scheme.group_size is not None, "a block is a group"
    outputs, inner = stored.entry.shape
    groups = outputs, inner // scheme.group_size
    parts = [(WEIGHT, INTEGERS, "U8", (outputs, inner)), (WEIGHT_SCALE, SCALES, "F32", groups)]
    if scheme.zeros is Zeros.MINIMUM:
        parts.append((WEIGHT_MINIMUM, MINIMUMS, "F32", groups))
    for name, ending, dtype, shape in parts:
        entry = replace(stored.entry, dtype=dtype, shape=shape)
        yield Part(
            replace(stored, name=stored.name + ending, entry=entry),
            WeightTarget(parameter_name(target.parameter, name), target.shard),
            Conversion.UNPACKED,
            scheme=scheme,
        )


def _others_of(
    found: Mapping[str, StoredTensor], key: str, scheme: IntegerScheme
) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors beside those of integers, by the names of their parameters."""
    names = [WEIGHT_SCALE]
    names += [WEIGHT_ZERO] if scheme.zeros is Zeros.POINT else []
    names += [WEIGHT_GROUP] if scheme.has_order else []
    names += [WEIGHT_GLOBAL] if scheme.has_global_scale else []
    for name in names:
        yield name, _found(found, found[key], part_key(key, name))


def _found(found: Mapping[str, StoredTensor], stored: StoredTensor, key: str) -> StoredTensor:
    if key not in found:
        raise ConfigError(
            f"{stored.path}: the tensor {stored.name!r} is quantized, but {key!r} is missing. "
            "Download the folder again."
        )
    return found[key]
