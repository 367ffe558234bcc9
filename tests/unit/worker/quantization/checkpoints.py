"""Small checkpoints in each FP8 format, and the same weights dequantized."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.worker.models import models
from trimaran.kernels.byte_reference import dequantize_weight, quantize_weight, to_fp8

BLOCK = (16, 32)
"""Rows and columns of blocks: widths of 72 and 104 leave smaller ones at the end."""

STATIC_SCALE = 0.02


def numbers(strategy: str, **more: Any) -> dict[str, Any]:
    """A description of FP8 numbers in compressed-tensors."""
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}


def compressed(weights: str, inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A compressed-tensors configuration with one group."""
    structure = {"block_structure": list(BLOCK)} if weights == "block" else {}
    group = {
        "targets": ["Linear"],
        "weights": numbers(weights, **structure),
        "input_activations": inputs,
    }
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], **more,
    }  # fmt: skip


_GROUPS = numbers("group", dynamic=True, group_size=BLOCK[1])
_BLOCKS = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
FORMATS: dict[str, tuple[dict[str, Any], str, str]] = {
    "fp8-tensor-dynamic": (
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, "tensor", "",
    ),
    "fp8-tensor-static": (
        {"quant_method": "fp8", "activation_scheme": "static"}, "tensor", "input_scale",
    ),
    "fp8-blocks": (_BLOCKS, "block", ""),
    "fp8-blocks-powers": ({**_BLOCKS, "scale_fmt": "ue8m0"}, "block", ""),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1.5}, "channel", ""),
    "compressed-tensor-static": (
        compressed("tensor", numbers("tensor", dynamic=False)), "tensor", "input_scale",
    ),
    "compressed-channel-token": (
        compressed("channel", numbers("token", dynamic=True)), "channel", "",
    ),
    "compressed-blocks": (compressed("block", _GROUPS), "block", ""),
    "modelopt-static": (
        {"quant_method": "modelopt", "quant_algo": "FP8",
         "exclude_modules": ["lm_head", "model.layers.1.self_attn*"]},
        "tensor", "input_scale",
    ),
}  # fmt: skip
"""Configuration, kind of scales and the name of static scales of inputs, by format."""


def is_quantized(name: str, values: dict[str, Any]) -> bool:
    """Whether a format quantizes the tensor of this name."""
    if "norm" in name or "embed" in name or "lm_head" in name or not name.endswith("weight"):
        return False
    if name.endswith((".gate.weight", "shared_expert_gate.weight")):
        return False
    return not ("exclude_modules" in values and ".1.self_attn" in name)


_SECOND = ("k_proj", "up_proj", "w3")
"""Stacked matrices whose static scales of inputs are larger than those beside them."""


def expert_factors(count: int) -> list[tuple[float, float]]:
    """By which factors the static scales of experts differ: for gate and up, and for down."""
    return [(1.1 + 0.05 * number, 1.0 + 0.05 * number) for number in range(count)]


def _factor(layer: str) -> float:
    """By which factor a layer's static scale differs from the others."""
    of_experts = re.search(r"experts[.](\d+)[.]", layer)
    # Stacked matrices have scales of their own, of which the largest counts.
    is_second = layer.endswith(_SECOND if of_experts else "k_proj")
    return 1 + 0.1 * is_second + (0.05 * int(of_experts[1]) if of_experts else 0)


def quantize_folder(folder: Path, form: str) -> None:
    """Rewrite a float checkpoint of one file in the format; static scales fit the layers'
    inputs of the tests."""
    values, kind, static = FORMATS[form]
    path = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        if not is_quantized(name, values):
            tensors[name] = tensor
            continue
        layer = name.removesuffix(".weight")
        block = BLOCK if kind == "block" else None
        if kind == "tensor":
            scale = tensor.abs().max().float() / 448
            tensors[name] = to_fp8(tensor, scale)
        else:
            tensors[name], scale = quantize_weight(tensor, block)
            scale = scale[:, None] if kind == "channel" else scale
        is_inverse = values["quant_method"] == "fp8" and kind == "block"
        tensors[f"{layer}.weight_scale{'_inv' if is_inverse else ''}"] = scale
        if static:
            tensors[f"{layer}.{static}"] = torch.tensor(STATIC_SCALE * _factor(layer))
        if values["quant_method"] == "fbgemm_fp8":
            tensors[f"{layer}.input_scale_ub"] = torch.tensor([1.5])
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": values}))


def dequantize_folder(folder: Path, target: Path) -> None:
    """Write the checkpoint with its weights as floats: what another program would compute."""
    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    values = config.pop("quantization_config")
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    block = BLOCK if "block" in str(values) else None
    floats = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            layer = name.removesuffix(".weight")
            scale = tensors.get(
                f"{layer}.weight_scale", tensors.get(f"{layer}.weight_scale_inv")
            )
            floats[name] = dequantize_weight(tensor, scale, block, torch.float32)
        elif "scale" not in name:
            floats[name] = tensor
    save_file(floats, target / "model.safetensors", {"format": "pt"})


def make(folder: Path, form: str, config: Any) -> Path:
    """A checkpoint in a format, made of a random model of transformers."""
    models.save_huggingface(folder / form, config)
    quantize_folder(folder / form, form)
    return folder / form
