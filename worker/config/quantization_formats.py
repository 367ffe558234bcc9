"""The formats in which checkpoints describe quantized weights, read into one configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.integer_formats import (
    NVFP4_FORMAT,
    compressed_integers,
    compressed_nvfp4,
    read_awq,
    read_gptq,
    read_mxfp4,
)
from trimaran.worker.config.quantization import ANY_LINEAR, QuantizationConfig, SchemeRule
from trimaran.worker.config.schemes import (
    Activations,
    Fp8Scheme,
    IntegerScheme,
    Layout,
    NotServedError,
    Scheme,
)

SERVED_METHODS = (
    "fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "gptq", "awq", "mxfp4",
)  # fmt: skip

_E4M3_NAMES = ("e4m3", "float8_e4m3fn", "float8_e4m3")
_COMPRESSED_FORMATS = ("float-quantized", "naive-quantized", "dense")
_INTEGER_FORMATS = ("pack-quantized", "int-quantized")
_MODELOPT_ALGORITHMS: dict[str, Scheme] = {
    "NVFP4": IntegerScheme(bits=4, group_size=16, layout=Layout.NVFP4),
    "FP8": Fp8Scheme(activations=Activations.STATIC),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Scheme(),
}
_FP8_BITS = 8


def read_quantization(values: Mapping[str, Any]) -> QuantizationConfig:
    """The configuration of a checkpoint's ``quantization_config``, or of the contents of
    ``hf_quant_config.json`` with the method ``modelopt``.

    Raises:
        NotServedError: the method or a part of the method is not served.
        ConfigError: the scales of weights and inputs are incompatible.
    """
    method = str(values.get("quant_method", "")).lower()
    reader = _READERS.get(method)
    if reader is None:
        raise NotServedError(f"the method {method or 'without a name'!r}")
    try:
        return reader(values)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise NotServedError(f"a description that cannot be read ({error!r})") from None


def _fp8(values: Mapping[str, Any]) -> QuantizationConfig:
    """Transformers' and vLLM's format: one scale a matrix, or a scale for each block."""
    number = str(values.get("fmt") or "e4m3").lower()
    if number not in _E4M3_NAMES:
        raise NotServedError(f"fmt {number}")
    if values.get("expert_dtype") not in (None, "fp8"):
        raise NotServedError(f"expert_dtype {values['expert_dtype']}")
    if values.get("modules_to_convert"):
        raise NotServedError("modules_to_convert")
    activations = _choice(values, "activation_scheme", ("dynamic", "static"), "dynamic")
    size = values.get("weight_block_size")
    has_powers = _choice(values, "scale_fmt", ("float", "ue8m0"), "float") == "ue8m0"
    if size is None:
        is_static = activations == "static"
        scheme = Fp8Scheme(activations=Activations.STATIC if is_static else Activations.TOKEN)
    elif activations == "static":
        raise NotServedError("blocks of weights with static scales of inputs")
    else:
        scheme = Fp8Scheme(
            block=_block(size), activations=Activations.GROUP, has_power_scales=has_powers
        )
    ignored = (*_names(values, "modules_to_not_convert"), *_names(values, "ignored_layers"))
    return _of_all_linears("fp8", scheme, ignored)


def _fbgemm(values: Mapping[str, Any]) -> QuantizationConfig:
    """A scale for each row and token."""
    bound = float(values.get("activation_scale_ub") or 0.0)
    scheme = Fp8Scheme(activation_bound=bound)
    return _of_all_linears("fbgemm_fp8", scheme, _names(values, "modules_to_not_convert"))


def _compressed(values: Mapping[str, Any]) -> QuantizationConfig:
    """Groups of layers, each with a description of its numbers."""
    stored = str(values.get("format") or "float-quantized")
    sparsity = values.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise NotServedError(f"sparsity_config {sparsity['format']}")
    rules = []
    for group in dict(values["config_groups"]).values():
        form = str(group.get("format") or stored)
        if form not in (*_COMPRESSED_FORMATS, *_INTEGER_FORMATS, NVFP4_FORMAT):
            raise NotServedError(f"format {form}")
        targets = tuple(str(target) for target in group["targets"])
        rules.append(SchemeRule(targets=targets, scheme=_compressed_scheme(group, form)))
    # A layer's name counts before its class.
    rules.sort(key=lambda rule: ANY_LINEAR in rule.targets)
    ignored = _names(values, "ignore")
    return QuantizationConfig(
        method="compressed-tensors", rules=tuple(rules), ignored=tuple(ignored)
    )


def _compressed_scheme(group: Mapping[str, Any], form: str) -> Scheme:
    if form == NVFP4_FORMAT:
        return compressed_nvfp4(group)
    if form in _INTEGER_FORMATS or (group.get("weights") or {}).get("type") == "int":
        return compressed_integers(group, form)
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    for name, numbers in (("weights", weights), ("input_activations", inputs)):
        if not numbers:
            raise NotServedError(f"{name} that are not quantized")
        found = numbers.get("num_bits"), numbers.get("type")
        if found != (_FP8_BITS, "float"):
            raise NotServedError(f"{name} of {found[0]} bits, type {found[1]}")
    if weights.get("symmetric") is False:
        raise NotServedError("weights with zero points")
    assert inputs is not None, "checked above"
    strategy = _choice(weights, "strategy", ("tensor", "channel", "block", "group"), "tensor")
    block = None
    if strategy == "block":
        block = _block(weights["block_structure"])
    elif strategy == "group":
        block = _block((1, weights["group_size"]))
    return Fp8Scheme(block=block, activations=_compressed_activations(inputs, block))


def _compressed_activations(
    inputs: Mapping[str, Any], block: tuple[int, int] | None
) -> Activations:
    strategy = _choice(inputs, "strategy", ("tensor", "token", "group"), "tensor")
    if inputs.get("dynamic") is not True:
        if strategy != "tensor" or inputs.get("dynamic"):
            raise NotServedError(f"static inputs with a scale by {strategy}")
        return Activations.STATIC
    if strategy != "group":
        # A scale per token is finer than a scale of the whole batch, and independent of other
        # tokens.
        return Activations.TOKEN
    if block is None or int(inputs["group_size"]) != block[1]:
        raise NotServedError(f"groups of {inputs.get('group_size')} inputs beside such weights")
    return Activations.GROUP


def _modelopt(values: Mapping[str, Any]) -> QuantizationConfig:
    """One algorithm for all layers, or one for each that is listed."""
    nested = values.get("quantization")
    values = {**values, **(nested if isinstance(nested, Mapping) else {})}
    algorithm = str(values.get("quant_algo") or "").upper()
    ignored = (*_names(values, "exclude_modules"), *_names(values, "ignore"))
    if not algorithm and values.get("kv_cache_quant_algo"):
        # The KV cache alone is quantized.
        return QuantizationConfig(method="modelopt", rules=(), ignored=ignored)
    if algorithm != "MIXED_PRECISION":
        scheme = _modelopt_scheme(algorithm)
        size = values.get("group_size")
        if isinstance(scheme, IntegerScheme) and size not in (None, scheme.group_size):
            raise NotServedError(f"quant_algo {algorithm} with groups of {size}")
        return _of_all_linears("modelopt", scheme, ignored)
    layers = {
        str(name): str((layer or {}).get("quant_algo") or "").upper()
        for name, layer in dict(values["quantized_layers"]).items()
    }
    rules = [
        SchemeRule(
            targets=tuple(name for name, each in layers.items() if each == algorithm),
            scheme=_modelopt_scheme(algorithm),
        )
        for algorithm in sorted(set(layers.values()) - {""})
    ]
    return QuantizationConfig(method="modelopt", rules=tuple(rules), ignored=ignored)


def _modelopt_scheme(algorithm: str) -> Scheme:
    if algorithm not in _MODELOPT_ALGORITHMS:
        raise NotServedError(f"quant_algo {algorithm or 'without a name'}")
    return _MODELOPT_ALGORITHMS[algorithm]


_READERS: dict[str, Callable[[Mapping[str, Any]], QuantizationConfig]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "gptq": read_gptq,
    "awq": read_awq,
    "mxfp4": read_mxfp4,
}


def _of_all_linears(
    method: str, scheme: Scheme, ignored: tuple[str, ...]
) -> QuantizationConfig:
    rule = SchemeRule(targets=(ANY_LINEAR,), scheme=scheme)
    return QuantizationConfig(method=method, rules=(rule,), ignored=ignored)


def _choice(values: Mapping[str, Any], key: str, served: tuple[str, ...], default: str) -> str:
    word = str(values.get(key) or default).lower()
    if word not in served:
        raise NotServedError(f"{key} {word}")
    return word


def _names(values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = values.get(key) or ()
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{key} is {names!r} but must be a list of strings")
    return tuple(names)


def _block(size: Any) -> tuple[int, int]:
    rows, columns = (int(number) for number in size)
    if rows < 1 or columns < 1:
        raise NotServedError(f"blocks of {rows}x{columns}")
    return rows, columns
