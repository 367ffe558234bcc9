"""The numbers that a rank's quantized layers stand for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trimaran.kernels.integer_reference import dequantize
from trimaran.worker.layers.linear import ParallelLinear
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.quantization.fp8_linear import Fp8LinearMethod
from trimaran.worker.quantization.integer_linear import IntegerLinearMethod


def floats_of(layer: ParallelLinear) -> Tensor:
    """Float32 [E, D]. A layer in FP8 has its products by plain torch already, a layer of
    integers not yet."""
    if isinstance(layer.method, IntegerLinearMethod):
        return dequantize(layer.method.weight_of(layer))
    if not isinstance(layer.method, Fp8LinearMethod):
        return layer.weight.data
    weight = layer.byte_product._weight
    if weight.blocks is None:
        return weight.values.float() * weight.scales[:, None]
    spread = torch.empty(weight.values.shape)
    for number, group in enumerate(weight.blocks.groups(weight.values.shape[1])):
        spread[:, group] = weight.scales[:, number][weight.blocks.rows][:, None]
    return weight.values.float() * spread


def linear_weights(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """Each matrix of a single rank's linear layers, by its name in checkpoints."""
    for path, layer in model.named_modules():
        if not isinstance(layer, ParallelLinear):
            continue
        floats = floats_of(layer)
        parent, _, name = path.rpartition(".")
        for part, each in layer.output_parts.items():
            own = f"{part}_proj" if part else name
            theirs = f"model.{parent}.{own}".replace("attention", "self_attn")
            yield theirs, floats[each.offset : each.offset + each.partition.size]
