"""PEFT adapters for the demo model."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

MODULES = {
    "self_attn.q_proj": (256, 256),
    "self_attn.v_proj": (128, 256),
    "mlp.up_proj": (512, 256),
}
"""Outputs and inputs of the demo model's linear layers."""


def write_peft(folder, seed):
    """An adapter of size 4 for some modules of every layer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(8):
        for path, (outputs, inputs) in MODULES.items():
            name = f"base_model.model.model.layers.{layer}.{path}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) / 16
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) / 4
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4.0}
    (folder / "adapter_config.json").write_text(json.dumps(config))
