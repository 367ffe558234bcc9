"""Small checkpoints of integer weights in each format, and the same weights dequantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.worker.models import models

GROUP = 24
"""Inputs of a group: widths of 72 and 104 make the last group of the latter smaller."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs in a word of AWQ, from the lowest bits up."""


class Form(NamedTuple):
    """A format: its configuration, and how its numbers are made."""

    config: dict[str, Any]
    kind: str
    bits: int = 4
    group: int | None = GROUP
    is_symmetric: bool = False
    has_order: bool = False


def compressed(form: str, **numbers: Any) -> dict[str, Any]:
    """A compressed-tensors configuration with one group of layers."""
    inputs = numbers.pop("inputs", None)
    group = {
        "targets": ["Linear"],
        "weights": {"type": "int", **numbers},
        "input_activations": inputs,
    }
    return {
        "quant_method": "compressed-tensors", "format": form,
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


def _gptq(bits: int = 4, group: int = GROUP, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **more}


_W4 = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
_W8 = {"num_bits": 8, "strategy": "channel", "symmetric": True}
_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
INPUT_SCALE = 4 / 127
"""The static scale of inputs, which clamps some of them."""

FORMS = {
    "gptq": Form(_gptq(), "gptq"),
    "gptq-v2": Form(_gptq(checkpoint_format="gptq_v2"), "gptq"),
    "gptq-desc-act": Form(_gptq(desc_act=True), "gptq", has_order=True),
    "gptq-8-bits-rows": Form(_gptq(8, -1, sym=True), "gptq", 8, None, is_symmetric=True),
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
                "awq"),
    "packed": Form(compressed("pack-quantized", **_W4, symmetric=True), "packed",
                   is_symmetric=True),
    "packed-zeros": Form(compressed("pack-quantized", **_W4, symmetric=False), "packed"),
    "packed-actorder": Form(
        compressed("pack-quantized", **_W4, symmetric=True, actorder="group"), "packed",
        is_symmetric=True, has_order=True),
    "packed-8-bits": Form(
        compressed("pack-quantized", num_bits=8, strategy="group", group_size=GROUP), "packed",
        8, is_symmetric=True),
    "plain-8-bits": Form(compressed("int-quantized", **_W8), "plain", 8, None,
                         is_symmetric=True),
    "plain-bytes": Form(compressed("int-quantized", **_W8, inputs=_TOKENS), "plain", 8, None,
                        is_symmetric=True),
    "plain-static-bytes": Form(compressed("int-quantized", **_W8, inputs=_STATIC), "plain", 8,
                               None, is_symmetric=True),
}  # fmt: skip


def has_static_inputs(form: Form) -> bool:
    """Whether inputs become bytes with the scale `INPUT_SCALE`."""
    return "'dynamic': False" in str(form.config)


class Numbers(NamedTuple):
    """The integers of a weight [E, D], scales [E, G], zero points [E, G] and groups [D]."""

    integers: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    def floats(self) -> Tensor:
        """What the numbers stand for, in float32."""
        zeros = self.zeros[:, self.groups]
        return (self.integers - zeros).float() * self.scales.float()[:, self.groups]


def quantize(weight: Tensor, form: Form, seed: int = 0) -> Numbers:
    """Round a weight to the integers of a format."""
    outputs, inner = weight.shape
    size = form.group or inner
    groups = torch.arange(inner) // size
    if form.has_order:
        generator = torch.Generator().manual_seed(seed)
        groups = groups[torch.randperm(inner, generator=generator)]
    most = (1 << form.bits) - 1
    count = int(groups.max()) + 1
    low, high = torch.zeros(outputs, count), torch.zeros(outputs, count)
    for number in range(count):
        mine = weight[:, groups == number].float()
        low[:, number] = mine.amin(1).clamp_max(0)
        high[:, number] = mine.amax(1).clamp_min(0)
    if form.is_symmetric:
        scales = (torch.maximum(-low, high) / (most // 2)).to(torch.float16)
        zeros = torch.full_like(scales, most // 2 + 1).int()
    else:
        scales = ((high - low) / most).to(torch.float16)
        # 1 to 15: GPTQ of the first version stores one less.
        zeros = (-low / scales.float()).round().clamp(1, most).int()
    spread = scales.float()[:, groups], zeros[:, groups]
    integers = (weight.float() / spread[0]).round().int() + spread[1]
    return Numbers(integers.clamp(0, most), scales, zeros, groups)


def words(integers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32: integers of the last dim packed into words, padded with zeros."""
    count = 32 // bits
    padded = torch.nn.functional.pad(integers.long(), (0, -integers.shape[-1] % count))
    grouped = padded.unflatten(-1, (-1, count))
    total = sum(
        grouped[..., source] << (bits * place)
        for place, source in enumerate(order or range(count))
    )
    return (total & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def stored(numbers: Numbers, form: Form) -> dict[str, Tensor]:
    """The tensors of a weight, by the endings of their names."""
    integers, scales, zeros, groups = numbers
    bits, half = form.bits, 1 << (form.bits - 1)
    if form.kind == "gptq":
        less = 0 if form.config.get("checkpoint_format") == "gptq_v2" else 1
        return {
            "qweight": words(integers, bits).t().contiguous(),
            "qzeros": words(zeros.t() - less, bits),
            "scales": scales.t().contiguous(),
            "g_idx": groups.int(),
        }
    if form.kind == "awq":
        return {
            "qweight": words(integers.t(), bits, AWQ_ORDER),
            "qzeros": words(zeros.t(), bits, AWQ_ORDER),
            "scales": scales.t().contiguous(),
        }
    if form.kind == "plain":
        made = {"weight": (integers - half).to(torch.int8), "weight_scale": scales}
        if has_static_inputs(form):
            made["input_scale"] = torch.tensor([INPUT_SCALE])
        return made
    tensors = {
        "weight_packed": words(integers, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(integers.shape),
    }
    if not form.is_symmetric:
        tensors["weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
    if form.has_order:
        tensors["weight_g_idx"] = groups.int()
    return tensors


_STACKED = ("q_proj", "k_proj", "v_proj", "gate", "up", "w1", "w3")


def is_quantized(name: str) -> bool:
    """Whether the tensor of this name is the weight of a linear layer."""
    others = ("norm", "embed", "lm_head", ".gate.weight", "expert_gate")
    return name.endswith("weight") and not any(other in name for other in others)


def make(folder: Path, form: Form, config: Any) -> Path:
    """A checkpoint in a format made of a random model of transformers, and beside the folder
    the same weights as floats: ``floats``."""
    source = folder / "floats"
    models.save_huggingface(source, config)
    tensors = load_file(source / "model.safetensors")
    made: dict[str, Tensor] = {}
    for seed, (name, tensor) in enumerate(tensors.items()):
        if not is_quantized(name):
            made[name] = tensor
            continue
        # Stacked matrices see the same inputs, and so the same order.
        is_stacked = any(part in name for part in _STACKED)
        numbers = quantize(tensor, form, seed=0 if is_stacked else seed)
        layer = name.removesuffix(".weight")
        made |= {
            f"{layer}.{ending}": each.contiguous()
            for ending, each in stored(numbers, form).items()
        }
        tensors[name] = numbers.floats()
    target = folder / "quantized"
    target.mkdir()
    save_file(made, target / "model.safetensors")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    values = json.loads((source / "config.json").read_text())
    text = json.dumps({**values, "quantization_config": form.config})
    (target / "config.json").write_text(text)
    return target
