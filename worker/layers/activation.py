"""Activations of an MLP, gated and element-wise."""

from __future__ import annotations

from torch import Tensor, nn

from trimaran.worker.layers.linear import LayerContext, MergedColumnParallelLinear
from trimaran.worker.layers.methods import UnquantizedLinearMethod


class GatedActivation(nn.Module):
    """``act(gate) * up`` of a stacked gate and up projection; ``silu`` or a kind of GELU."""

    def __init__(self, context: LayerContext, name: str) -> None:
        super().__init__()
        self._ops = context.ops
        self._name = name

    def forward(self, gate_up_TE: Tensor) -> Tensor:
        """[T, 2F] to [T, F]."""
        if self._name == "silu":
            return self._ops.silu_and_mul(gate_up_TE)
        return self._ops.gelu_and_mul(gate_up_TE, self._name)

    def project(self, gate_up: MergedColumnParallelLinear, x_TD: Tensor) -> Tensor:
        """``forward(gate_up(x))``, fused unless bias, LoRA or quantization come between."""
        is_plain = isinstance(gate_up.method, UnquantizedLinearMethod)
        is_alone = gate_up.bias is None and not gate_up.lora.is_active
        if is_plain and is_alone and self._name == "silu":
            return self._ops.gated_linear(x_TD, gate_up.weight)
        return self.forward(gate_up.forward(x_TD))


class Activation(nn.Module):
    """An element-wise activation by its name in a configuration."""

    def __init__(self, context: LayerContext, name: str) -> None:
        super().__init__()
        self._ops = context.ops
        self._name = name

    def forward(self, x_TD: Tensor) -> Tensor:
        """Same shape."""
        return self._ops.activation(x_TD, self._name)
