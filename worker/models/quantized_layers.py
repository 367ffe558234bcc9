"""The method of each linear layer and of experts, chosen by names in the checkpoint."""

from __future__ import annotations

import logging

import torch

from trimaran.comm.errors import ConfigError
from trimaran.kernels.integer_reference import pack, quantize_weight
from trimaran.kernels.integers import Groups, IntegerWeight
from trimaran.kernels.operators import Ops
from trimaran.worker.config.schemes import Fp8Scheme, Scheme
from trimaran.worker.layers.experts import Experts, UnquantizedExpertMethod
from trimaran.worker.layers.linear import ParallelLinear
from trimaran.worker.layers.methods import (
    ExpertMethod,
    LinearMethod,
    UnquantizedLinearMethod,
)
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.quantization.fp8_experts import Fp8ExpertMethod
from trimaran.worker.quantization.fp8_linear import Fp8LinearMethod
from trimaran.worker.quantization.integer_experts import IntegerExpertMethod
from trimaran.worker.quantization.integer_linear import IntegerLinearMethod
from trimaran.worker.quantization.self_check import check_integer_product

Fp8Method = Fp8LinearMethod | Fp8ExpertMethod
IntegerMethod = IntegerLinearMethod | IntegerExpertMethod
QuantizedMethod = Fp8Method | IntegerMethod

_HEAD_ROWS = 4096

logger = logging.getLogger(__name__)


def choose_methods(model: CausalLM) -> None:
    """Give each linear layer, and each layer of experts, the method that the model's
    quantization names, and memory.

    Raises:
        ConfigError: stacked matrices of a layer, or its experts, are quantized differently, or
            in a way that is not served for experts.
    """
    context = model.context
    if context.quantization is None:
        return
    keys_of: dict[str, list[str]] = {}
    for key, targets in model.checkpoint_weights().items():
        for target in targets:
            keys_of.setdefault(target.parameter, []).append(key)
    for path, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            scheme = _scheme_of(model, keys_of[f"{path}.weight"])
            module.use_method(_method_of(scheme, context.ops), context.device)
        elif isinstance(module, Experts):
            keys = [key for name in module.matrices for key in keys_of[f"{path}.{name}"]]
            scheme = _scheme_of(model, keys)
            module.use_method(_expert_method_of(scheme, context.ops), context.device)


def finish_weights(model: CausalLM) -> None:
    """Let every layer's method finish, and the head, once all weights are loaded."""
    model.process_weights_after_loading()
    _quantize_head(model)


def _quantize_head(model: CausalLM) -> None:
    """Let the output head multiply by integers if the model's quantization says so, once its
    floats are loaded."""
    quantization = model.context.quantization
    if quantization is None or not quantization.head_bits or not model.stage.is_last:
        return
    head, bits = model.lm_head, quantization.head_bits
    # Some rows at a time: float32 of all rows would take several times the weight's memory.
    made = [quantize_weight(rows, bits, None) for rows in torch.split(head.floats, _HEAD_ROWS)]
    weight = IntegerWeight(
        pack(torch.cat([integers for integers, _ in made]), bits),
        torch.cat([scales for _, scales in made]),
        Groups(head.floats.shape[1]),
        bits,
    )
    product = model.context.ops.integer_product(weight)
    check_integer_product(product, weight, head.floats.dtype, has_byte_inputs=False)
    head.use_product(product)


def log_methods(model: CausalLM) -> None:
    """Name the method of the linear layers, and the layers that have another one."""
    quantization = model.context.quantization
    if quantization is None:
        return
    methods = {
        path: module.method.name
        for path, module in model.named_modules()
        if isinstance(module, (ParallelLinear, Experts))
    }
    floats = [path for path, name in methods.items() if name == UnquantizedLinearMethod.name]
    logger.info(
        "%d of %d products and layers of experts are quantized (%s%s), each compared with its "
        "definition%s",
        len(methods) - len(floats),
        len(methods),
        quantization.describe(),
        f", the head to {quantization.head_bits} bits" if quantization.head_bits else "",
        f"; not quantized: {', '.join(floats)}" if floats else "",
    )


def scheme_of_key(model: CausalLM, key: str) -> Scheme | None:
    """The scheme of the layer whose weight has this name in `CausalLM.checkpoint_weights`."""
    quantization = model.context.quantization
    if quantization is None:
        return None
    name = key.removesuffix(".weight")
    prefixes = (
        "",
        model.name_prefix,
        model.outer_prefix,
        model.outer_prefix + model.name_prefix,
    )
    return quantization.scheme_of(tuple(dict.fromkeys(prefix + name for prefix in prefixes)))


def quantized_method_of(model: CausalLM, parameter: str) -> QuantizedMethod | None:
    """The method by which a parameter is a quantized weight; None for other parameters."""
    path, _, name = parameter.rpartition(".")
    module = model.get_submodule(path)
    method = getattr(module, "method", None)
    if isinstance(module, Experts):
        is_weight = name in module.matrices
        return method if is_weight and isinstance(method, QuantizedMethod) else None
    return method if name == "weight" and isinstance(method, QuantizedMethod) else None


def _method_of(scheme: Scheme | None, ops: Ops) -> LinearMethod:
    if scheme is None:
        return UnquantizedLinearMethod(ops)
    if isinstance(scheme, Fp8Scheme):
        return Fp8LinearMethod(ops, scheme)
    return IntegerLinearMethod(ops, scheme)


def _expert_method_of(scheme: Scheme | None, ops: Ops) -> ExpertMethod:
    if scheme is None:
        return UnquantizedExpertMethod(ops)
    if isinstance(scheme, Fp8Scheme):
        return Fp8ExpertMethod(ops, scheme)
    return IntegerExpertMethod(ops, scheme)


def _scheme_of(model: CausalLM, keys: list[str]) -> Scheme | None:
    schemes = {key: scheme_of_key(model, key) for key in keys}
    if len(set(schemes.values())) > 1:
        listed = ", ".join(
            f"{key} {'not at all' if scheme is None else scheme.algorithm}"
            for key, scheme in schemes.items()
        )
        raise ConfigError(
            f"these weights are multiplied as one, but the checkpoint quantizes them "
            f"differently: {listed}. Name a checkpoint that treats them alike, or one in "
            "bfloat16, float16 or float32."
        )
    return next(iter(schemes.values()))
