"""LoRA adapters as PEFT writes them: a JSON file, and matrices by the names of layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from trimaran.worker.lora.layout import MODULE_NAMES, Matrices

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# What a PEFT adapter calls a linear layer (the last word of its path, or the last two), and
# the module that it is. Of Llama's MLP the gate is h_to_4h and the up projection the gate.
_PEFT_MODULES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "qkv_proj": "attn_qkv",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "up_proj": "mlp_gate",
    "down_proj": "mlp_4h_to_h",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_dense",
    "mlp.c_fc": "mlp_h_to_4h",
    "mlp.c_proj": "mlp_4h_to_h",
    "w1": "moe_h_to_4h",
    "w2": "moe_4h_to_h",
    "w3": "moe_gate",
    "gate": "moe_router",
}


class AdapterFormatError(ValueError):
    """An adapter that cannot be read, or that does not fit the model."""


def read_peft(folder: Path) -> list[Matrices]:
    """The matrices of a PEFT folder, by layer and module; the scaling is in the second ones.

    Raises:
        AdapterFormatError: no plain LoRA adapter of layers that are known.
    """
    config = _peft_config(folder)
    pairs: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(folder / PEFT_WEIGHTS, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # it is no dictionary
                path, _, kind = key.removesuffix(".weight").rpartition(".")
                if kind not in ("lora_A", "lora_B"):
                    raise AdapterFormatError(
                        f"{folder / PEFT_WEIGHTS}: the tensor {key!r} is no LoRA matrix of a "
                        "linear layer; train the adapter on linear layers alone"
                    )
                pairs.setdefault(path, {})[kind] = file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise AdapterFormatError(f"{folder / PEFT_WEIGHTS}: cannot be read: {error}") from None
    matrices = [_peft_matrices(folder, config, path, pair) for path, pair in pairs.items()]
    return sorted(matrices, key=lambda one: (one.layer, one.module))


def _peft_config(folder: Path) -> dict[str, Any]:
    path = folder / PEFT_CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AdapterFormatError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise AdapterFormatError(f"{path}: is not JSON: {error}") from None
    refused = {
        "peft_type": config.get("peft_type", "LORA") != "LORA",
        "use_dora": bool(config.get("use_dora")),
        "bias": config.get("bias", "none") != "none",
        "modules_to_save": bool(config.get("modules_to_save")),
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise AdapterFormatError(
                f"{path}: {name} is {config[name]!r}, but only plain LoRA adapters of linear "
                "layers are served, without biases or whole modules"
            )
    return config


def _peft_matrices(
    folder: Path, config: dict[str, Any], path: str, pair: dict[str, Tensor]
) -> Matrices:
    words = path.split(".")
    name = next((n for n in (".".join(words[-2:]), words[-1]) if n in _PEFT_MODULES), None)
    layer = next((int(word) for word in words if word.isdecimal()), None)
    if name is None or layer is None or len(pair) != 2:
        raise AdapterFormatError(
            f"{folder / PEFT_WEIGHTS}: adapts {path!r}, which is none of the layers that are "
            f"known: {', '.join(_PEFT_MODULES)}"
        )
    a, b = pair["lora_A"].float(), pair["lora_B"].float()
    scale = _scale(config, words, a.shape[0])
    return Matrices(MODULE_NAMES.index(_PEFT_MODULES[name]), layer, a, b * scale)


def _scale(config: dict[str, Any], words: Sequence[str], rank: int) -> float:
    """``alpha / rank``, or by its square root (rank-stabilised), with exceptions by layer."""
    alpha = float(config.get("lora_alpha", rank))
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if ".".join(words).endswith(pattern):
            alpha = float(value)
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)
