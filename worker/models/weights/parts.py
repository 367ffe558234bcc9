"""What of a checkpoint fills each parameter of a rank, quantized or dequantized on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.kernels.fp8_reference import dequantize_weight, quantize_weight
from trimaran.worker.config.schemes import Fp8Scheme
from trimaran.worker.models.interfaces import CausalLM, WeightTarget
from trimaran.worker.models.quantized_layers import fp8_method_of, scheme_of_key
from trimaran.worker.models.weights.checkpoint import FP8_WORD, StoredTensor
from trimaran.worker.quantization.fp8_linear import INPUT_SCALE, WEIGHT_SCALE, Fp8LinearMethod


class Conversion(Enum):
    """What becomes of a stored tensor before it is cut for ranks."""

    NONE = "as stored"
    DEQUANTIZED = "values times scales"
    VALUES = "FP8 values of floats"
    SCALES = "scales of floats"


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

    def whole(
        self, tensor: Tensor, read: Callable[[StoredTensor], Tensor], dtype: torch.dtype
    ) -> Tensor:
        """What is cut for ranks: ``tensor``, as stored, or converted.

        ``read`` gives the scales, and ``dtype`` is that of the parameter.
        """
        if self.conversion is Conversion.NONE:
            return tensor
        if self.conversion is Conversion.DEQUANTIZED:
            assert self.scales is not None
            return dequantize_weight(tensor, read(self.scales), self.block, dtype)
        weight = tensor.t() if self.target.is_transposed else tensor
        values, scales = quantize_weight(weight, self.block)
        made = values if self.conversion is Conversion.VALUES else scales
        return made.t() if self.target.is_transposed and made.dim() > 1 else made


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
    method = fp8_method_of(model, target.parameter)
    if method is not None:
        yield from _quantized_parts(model, found, key, target, method)
    elif stored.entry.dtype == FP8_WORD:
        scheme = scheme_of_key(model, key)
        if not isinstance(scheme, Fp8Scheme):
            raise ConfigError(
                f"{stored.path}: the tensor {stored.name!r} holds {FP8_WORD}, but config.json "
                "says that it is not quantized. Use the weights and the configuration of one "
                "model."
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
    method: Fp8LinearMethod,
) -> Iterator[Part]:
    """The parts of a quantized weight and of its scales."""
    stored, block = found[key], method.scheme.block
    layer = target.parameter.removesuffix("weight")
    scales = WeightTarget(layer + WEIGHT_SCALE, target.shard, target.is_transposed)
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


def _found(found: Mapping[str, StoredTensor], stored: StoredTensor, key: str) -> StoredTensor:
    if key not in found:
        raise ConfigError(
            f"{stored.path}: the tensor {stored.name!r} is quantized, but {key!r} is missing. "
            "Download the folder again."
        )
    return found[key]
