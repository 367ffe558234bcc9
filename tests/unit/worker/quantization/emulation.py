"""Transformers' models with inputs of products quantized as a format says, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.worker.quantization import checkpoints
from tests.unit.worker.quantization.checkpoints import BLOCK, FORMATS
from trimaran.kernels.byte_reference import quantize_groups, quantize_tokens
from trimaran.kernels.quantized import BlockMap, ByteInputs


def fake_quantized(x: Tensor, form: str, factor: float) -> Tensor:
    """Inputs [T, D] as products of the format see them; a static scale is times ``factor``."""
    values, kind, static = FORMATS[form]
    if kind == "block":
        blocks = BlockMap(torch.empty(0), BLOCK[1], 0)
        numbers, scales = quantize_groups(
            x, blocks, ByteInputs(None, 0.0, "scale_fmt" in values)
        )
        sizes = torch.tensor([s.stop - s.start for s in blocks.groups(x.shape[1])])
        scales = scales.repeat_interleave(sizes, 1)
    else:
        fixed = torch.tensor(checkpoints.STATIC_SCALE * factor) if static else None
        bound = values.get("activation_scale_ub", 0.0)
        numbers, scales = quantize_tokens(x, ByteInputs(fixed, bound))
    return numbers.float() * scales


def emulate(model: nn.Module, form: str) -> None:
    """Let a model's linear layers and experts see their inputs as the format quantizes them.

    Its weights are those of the format, dequantized.
    """
    for name, module in model.named_modules():
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            _emulate_experts(module, name, form)
        elif isinstance(module, nn.Linear) and _has_product(name, form):
            _emulate_linear(module, name, form)


def _has_product(name: str, form: str) -> bool:
    # The matrices of latent attention are dequantized, since queries are multiplied by them.
    is_quantized = checkpoints.is_quantized(f"{name}.weight", FORMATS[form][0])
    return is_quantized and not name.endswith("kv_b_proj")


def _emulate_linear(module: nn.Linear, name: str, form: str) -> None:
    stacked = ("q_proj", "k_proj", "v_proj")
    factor = 1.1 if name.split(".")[-1] in stacked else 1.0

    def quantized(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        rows = args[0].flatten(0, -2)
        return (fake_quantized(rows, form, factor).view_as(args[0]),)

    module.register_forward_pre_hook(quantized)


def _emulate_experts(module: nn.Module, name: str, form: str) -> None:
    def forward(x_TD: Tensor, ids_TC: Tensor, weights_TC: Tensor) -> Tensor:
        total_TD = torch.zeros_like(x_TD)
        for expert, number in enumerate(module.factors):
            token, choice = torch.where(ids_TC == expert)
            rows = fake_quantized(x_TD[token], form, number[0])
            gate, up = F.linear(rows, module.gate_up_proj[expert]).chunk(2, -1)
            inner = fake_quantized(F.silu(gate) * up, form, number[1])
            parts = F.linear(inner, module.down_proj[expert])
            total_TD.index_add_(0, token, parts * weights_TC[token, choice, None])
        return total_TD

    module.factors = checkpoints.expert_factors(len(module.gate_up_proj))
    module.forward = forward
