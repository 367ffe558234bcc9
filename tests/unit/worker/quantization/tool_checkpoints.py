"""Small checkpoints made by the tools that users make theirs with, and what the tools hold."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.unit.worker.models import models

BLOCK = (16, 8)
"""Rows and columns of blocks; inputs are whole blocks, as compressed-tensors demands."""

GROUP = 8

FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
INTEGERS: dict[str, Any] = {"num_bits": 4, "type": "int", "group_size": GROUP}

COMPRESSED: dict[str, dict[str, Any]] = {
    "tensor-static": {
        "weights": {**FP8, "strategy": "tensor"},
        "input_activations": {**FP8, "strategy": "tensor", "dynamic": False},
    },
    "channel-token": {
        "weights": {**FP8, "strategy": "channel"},
        "input_activations": {**FP8, "strategy": "token", "dynamic": True},
    },
    "blocks": {
        "weights": {**FP8, "strategy": "block", "block_structure": list(BLOCK)},
        "input_activations": {
            **FP8, "strategy": "group", "group_size": BLOCK[1], "dynamic": True,
        },
    },
    "packed": {"weights": {**INTEGERS, "strategy": "group", "symmetric": True}},
    "packed-zeros": {"weights": {**INTEGERS, "strategy": "group", "symmetric": False}},
    "packed-8-bits": {
        "weights": {**INTEGERS, "num_bits": 8, "strategy": "channel", "group_size": None},
    },
    "bytes": {
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        "input_activations": {
            "num_bits": 8, "type": "int", "strategy": "token", "symmetric": True,
            "dynamic": True,
        },
    },
}  # fmt: skip
"""Schemes of compressed-tensors, by name."""

(PROMPT,) = models.prompts(40)

INPUT_PEAK = 9.0
"""The largest input that static scales leave room for."""


class Made(NamedTuple):
    """A checkpoint of a tool."""

    folder: Path

    weights: dict[str, Tensor]
    """The weights of linear layers as the tool dequantizes them, by the layer's name."""

    logits: Tensor | None
    """Those of the tool's own model for `PROMPT`, whose inputs and weights are quantized; None
    where the tool needs a GPU."""


def compressed(folder: Path, name: str, config: Any) -> Made:
    """A checkpoint that compressed-tensors made of a random model in a scheme."""
    with warnings.catch_warnings():
        # Its own imports use what newer versions of other packages call old.
        warnings.simplefilter("ignore")
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationConfig,
            apply_quantization_config,
        )
    model = models.save_huggingface(folder / "floats", config)
    described = QuantizationConfig(
        config_groups={"group_0": {"targets": ["Linear"], **COMPRESSED[name]}},
        ignore=["lm_head"],
    )
    apply_quantization_config(model, described, show_progress=False)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            _choose_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder / name)
    compressor.update_config(str(folder / name))
    compressor.decompress_model(model)
    weights = {
        path: module.weight.detach().clone()
        for path, module in model.named_modules()
        if hasattr(module, "quantization_scheme")
    }
    return Made(folder / name, weights, _logits(model))


@torch.no_grad()
def _choose_scales(layer: nn.Module) -> None:
    """Give a layer of compressed-tensors scales and zero points of its weight's range."""
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme: Any = layer.quantization_scheme
    strategy = str(scheme.weights.strategy)
    low, high = _ranges(layer.weight, strategy)
    scales, zeros = calculate_qparams(low, high, scheme.weights)
    layer.weight_scale.copy_(scales.view_as(layer.weight_scale))
    if hasattr(layer, "weight_zero_point"):
        layer.weight_zero_point.copy_(zeros.view_as(layer.weight_zero_point))
    if hasattr(layer, "input_scale"):
        layer.input_scale.fill_(INPUT_PEAK / 448)


def _ranges(weight_ED: Tensor, strategy: str) -> tuple[Tensor, Tensor]:
    """The smallest and the largest number of each part of a weight that has a scale."""
    outputs, inner = weight_ED.shape
    rows, columns = {
        "tensor": (outputs, inner), "channel": (1, inner), "group": (1, GROUP), "block": BLOCK,
    }[strategy]  # fmt: skip
    padded = torch.nn.functional.pad(weight_ED, (0, 0, 0, -outputs % rows))
    parts = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    return parts.amin((1, 3)), parts.amax((1, 3))


_SQUARES = (8, 8)
"""Blocks of transformers, which quantizes a matrix only if whole blocks cover the matrix."""

TRANSFORMERS: dict[str, dict[str, Any]] = {
    "matrix": {"weight_block_size": None},
    "blocks": {"weight_block_size": _SQUARES},
    "blocks-powers": {"weight_block_size": _SQUARES, "scale_fmt": "ue8m0"},
}
"""Settings of transformers' FineGrainedFP8, by name."""


def transformers_fp8(folder: Path, name: str, config: Any) -> Made:
    """A checkpoint in whose numbers transformers' own operation quantized a random model.

    Transformers runs the operation as a model is loaded on a GPU, and no such model on a CPU.
    """
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    model = models.save_huggingface(folder / "floats", config)
    described = FineGrainedFP8Config(**TRANSFORMERS[name])
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=described))
    dequantize = quantize.reverse_op
    tensors, weights = dict(model.state_dict()), {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or path == "lm_head":
            continue
        made = quantize.convert({f"{path}.weight": module.weight.detach()})
        tensors |= made
        values, scales = made.values()
        plain = {"weight": [values], "weight_scale_inv": [scales]}
        (weights[path],) = dequantize.convert(plain, f"{path}.weight", model=model).values()
    folder = folder / name
    folder.mkdir()
    whole = {key: each.contiguous() for key, each in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    values = {**model.config.to_dict(), "quantization_config": described.to_dict()}
    (folder / "config.json").write_text(json.dumps(values))
    return Made(folder, weights, None)


MODELOPT = {
    "static": "FP8_DEFAULT_CFG",
    "channel-token": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
}
"""Configurations of ModelOpt, by name."""


def modelopt(folder: Path, name: str, config: Any) -> Made:
    """A checkpoint that ModelOpt calibrated and exported."""
    with warnings.catch_warnings():
        # The tool warns about versions of transformers and about settings of its own.
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint
        from modelopt.torch.quantization.qtensor import FP8QTensor

        model = models.save_huggingface(folder / "floats", config)
        model.config.architectures = ["LlamaForCausalLM"]
        mtq.quantize(model, getattr(mtq, MODELOPT[name]), _logits)
        logits = _logits(model)
        export_hf_checkpoint(model, export_dir=folder / name)
    weights = {}
    tensors = load_file(folder / name / "model.safetensors")
    for path, values in tensors.items():
        if values.dtype != torch.float8_e4m3fn:
            continue
        scales = tensors[f"{path}_scale"]
        stored = FP8QTensor(values.shape, torch.float32, values)
        spread = scales if scales.dim() == 0 else scales[:, None]
        layer = path.removesuffix(".weight")
        weights[layer] = stored.dequantize(torch.float32, scale=spread)
    return Made(folder / name, weights, logits)


@torch.inference_mode()
def _logits(model: nn.Module) -> Tensor:
    logits: Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits
