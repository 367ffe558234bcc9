"""Activations of an MLP, gated and element-wise."""

from __future__ import annotations

from torch import Tensor, nn

from trimaran.kernels.quantized import ByteRows
from trimaran.worker.layers.linear import (
    LayerContext,
    MergedColumnParallelLinear,
    ParallelLinear,
)
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

    def project(self, gate_up: MergedColumnParallelLinear, x_TD: Tensor | ByteRows) -> Tensor:
        """``forward(gate_up(x))``, fused unless bias, LoRA or quantization come between."""
        fused_TF = self._fused(gate_up, x_TD)
        return self.forward(gate_up.forward(x_TD)) if fused_TF is None else fused_TF

    def project_to(
        self, down: ParallelLinear, gate_up: MergedColumnParallelLinear, x_TD: Tensor | ByteRows
    ) -> Tensor | ByteRows:
        """`project` for the inputs of ``down`` alone, quantized where that is one kernel."""
        fused_TF = self._fused(gate_up, x_TD)
        if fused_TF is not None:
            return fused_TF
        gate_up_TE, product = gate_up.forward(x_TD), down.own_product
        rows = None if product is None else product.activate(gate_up_TE, self._name)
        return self.forward(gate_up_TE) if rows is None else rows

    def is_fused(self, gate_up: MergedColumnParallelLinear) -> bool:
        """Whether the projection is one kernel, as long as no adapter is active."""
        return gate_up.bias is None and self._name == "silu"

    def _fused(
        self, gate_up: MergedColumnParallelLinear, x_TD: Tensor | ByteRows
    ) -> Tensor | None:
        """The projection in one kernel, or None."""
        if not self.is_fused(gate_up) or gate_up.lora.is_active:
            return None
        if gate_up.own_product is not None:
            return gate_up.own_product.gated(x_TD)
        if gate_up.integer_product is not None and isinstance(x_TD, Tensor):
            return gate_up.integer_product.gated(x_TD)
        if isinstance(gate_up.method, UnquantizedLinearMethod) and isinstance(x_TD, Tensor):
            return self._ops.gated_linear(x_TD, gate_up.weight)
        return None


class Activation(nn.Module):
    """An element-wise activation by its name in a configuration."""

    def __init__(self, context: LayerContext, name: str) -> None:
        super().__init__()
        self._ops = context.ops
        self._name = name

    def forward(self, x_TD: Tensor) -> Tensor:
        """Same shape."""
        return self._ops.activation(x_TD, self._name)
