"""The descriptions of GPTQ, AWQ, FP4 and integer compressed-tensors, read into schemes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimaran.worker.config.quantization import ANY_LINEAR, QuantizationConfig, SchemeRule
from trimaran.worker.config.schemes import (
    Activations,
    IntegerScheme,
    Layout,
    NotServedError,
    Zeros,
)

_BITS = (4, 8)
NVFP4_FORMAT = Layout.NVFP4_PACKED.value
_NVFP4_GROUP = 16


def read_gptq(values: Mapping[str, Any]) -> QuantizationConfig:
    """One scheme for the layers of all blocks, and others for those that ``dynamic`` names."""
    words = {"gptq": Layout.GPTQ, "gptq_v2": Layout.GPTQ_V2}
    form = str(values.get("checkpoint_format") or "gptq").lower()
    if form not in words:
        raise NotServedError(f"checkpoint_format {form}")
    method = values.get("desc_act")
    scheme = IntegerScheme(
        bits=_bits(values.get("bits")),
        group_size=_group_size(values.get("group_size", 128)),
        zeros=Zeros.POINT,
        has_order=bool(method) and _group_size(values.get("group_size", 128)) is not None,
        layout=words[form],
    )
    targets: tuple[str, ...] = (ANY_LINEAR,)
    chosen = values.get("modules_in_block_to_quantize")
    if chosen:
        nested = [[each] if isinstance(each, str) else each for each in chosen]
        targets = tuple(str(name) for names in nested for name in names)
    rules, ignored = [], []
    for pattern, changes in dict(values.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            ignored.append(f"re:{pattern.removeprefix('-:')}")
            continue
        special = _changed(scheme, dict(changes))
        rules.append(SchemeRule(targets=(f"re:{pattern.removeprefix('+:')}",), scheme=special))
    rules.append(SchemeRule(targets=targets, scheme=scheme))
    ignored += _listed(values, "modules_to_not_convert")
    return QuantizationConfig(method="gptq", rules=tuple(rules), ignored=tuple(ignored))


def _changed(scheme: IntegerScheme, changes: dict[str, Any]) -> IntegerScheme:
    """The scheme of layers for which some values differ."""
    size = scheme.group_size
    if "group_size" in changes:
        size = _group_size(changes["group_size"])
    has_order = bool(changes.get("desc_act", scheme.has_order)) and size is not None
    bits = _bits(changes.get("bits", scheme.bits))
    return replace(scheme, bits=bits, group_size=size, has_order=has_order)


def read_awq(values: Mapping[str, Any]) -> QuantizationConfig:
    """Four bits with zero points."""
    version = str(values.get("version") or "gemm").lower()
    if version != "gemm":
        raise NotServedError(f"version {version}")
    bits = _bits(values.get("bits", values.get("w_bit", 4)))
    if bits != 4:
        raise NotServedError(f"{bits} bits")
    if values.get("zero_point", True) is not True:
        raise NotServedError("zero_point false")
    scheme = IntegerScheme(
        bits=bits,
        group_size=_group_size(values.get("group_size", values.get("q_group_size", 128))),
        zeros=Zeros.POINT,
        layout=Layout.AWQ,
    )
    # The names are parts of the names of modules.
    ignored = tuple(f"*{name}*" for name in _listed(values, "modules_to_not_convert"))
    rule = SchemeRule(targets=(ANY_LINEAR,), scheme=scheme)
    return QuantizationConfig(method="awq", rules=(rule,), ignored=ignored)


def read_mxfp4(values: Mapping[str, Any]) -> QuantizationConfig:
    """gpt-oss's format: all experts that ``modules_to_not_convert`` does not name."""
    # A name stands for a module and those inside.
    names = _listed(values, "modules_to_not_convert")
    ignored = tuple(part for name in names for part in (name, f"{name}.*"))
    scheme = IntegerScheme(bits=4, group_size=32, layout=Layout.MXFP4)
    rule = SchemeRule(targets=("*.experts.*",), scheme=scheme)
    return QuantizationConfig(method="mxfp4", rules=(rule,), ignored=ignored)


def compressed_nvfp4(group: Mapping[str, Any]) -> IntegerScheme:
    """The scheme of a group of layers of compressed-tensors in NVFP4; inputs that the
    description quantizes keep the model's dtype, which is closer to the original model."""
    weights = group["weights"]
    found = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if found != (4, "float", _NVFP4_GROUP):
        raise NotServedError(
            f"weights of {found[0]} bits, type {found[1]}, groups of {found[2]}"
        )
    return IntegerScheme(bits=4, group_size=_NVFP4_GROUP, layout=Layout.NVFP4_PACKED)


def compressed_integers(group: Mapping[str, Any], form: str) -> IntegerScheme:
    """The scheme of a group of layers of compressed-tensors, stored in the format ``form``."""
    weights, inputs = group["weights"], group.get("input_activations")
    if weights.get("type") != "int":
        raise NotServedError(f"weights of type {weights.get('type')} in the format {form}")
    bits = _bits(weights.get("num_bits"))
    strategy = str(weights.get("strategy") or "tensor").lower()
    if strategy not in ("tensor", "channel", "group"):
        raise NotServedError(f"strategy {strategy}")
    size = _group_size(weights["group_size"]) if strategy == "group" else None
    activations = _activations(inputs, bits) if inputs else None
    order = weights.get("actorder")
    order = {True: "group", False: None}.get(order, order)
    if order not in (None, "group", "static", "weight", "dynamic"):
        raise NotServedError(f"actorder {order}")
    return IntegerScheme(
        bits=bits,
        group_size=size,
        zeros=Zeros.NONE if weights.get("symmetric", True) else Zeros.POINT,
        # Only this kind leaves inputs in the groups of another order.
        has_order=order in ("group", "dynamic") and size is not None,
        activations=activations,
        layout=Layout.PACKED if form == "pack-quantized" else Layout.PLAIN,
    )


def _activations(inputs: Mapping[str, Any], bits: int) -> Activations:
    """The scales of inputs, which must be signed bytes."""
    found = inputs.get("num_bits"), inputs.get("type")
    if found != (8, "int") or bits != 8:
        raise NotServedError(
            f"weights of {bits} bits with inputs of {found[0]} bits, type {found[1]}"
        )
    if inputs.get("symmetric", True) is not True:
        raise NotServedError("inputs with zero points")
    is_dynamic = inputs.get("dynamic") is True
    strategy = inputs.get("strategy") or "tensor"
    if strategy not in (("token", "tensor") if is_dynamic else ("tensor",)):
        kind = "dynamic" if inputs.get("dynamic") else "static"
        raise NotServedError(f"{kind} INT8 inputs with a scale by {strategy}")
    # A scale per token is finer than a scale of the whole batch.
    return Activations.TOKEN if is_dynamic else Activations.STATIC


def _bits(value: Any) -> int:
    bits = int(value)
    if bits not in _BITS:
        raise NotServedError(f"{bits} bits")
    return bits


def _group_size(value: Any) -> int | None:
    size = int(value)
    if size == -1:
        return None
    if size < 2:
        raise NotServedError(f"groups of {size} inputs")
    return size


def _listed(values: Mapping[str, Any], key: str) -> list[str]:
    names = values.get(key) or []
    if isinstance(names, str):
        raise NotServedError(f"{key} that is no list")
    return [str(name) for name in names]
