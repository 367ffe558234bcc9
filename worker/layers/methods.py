"""Methods of layers: how products and experts multiply (quantization), and LoRA."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from trimaran.kernels.operators import Ops


class LinearMethod(Protocol):
    """How a linear layer stores its weight and multiplies by it."""

    name: str

    def create_weights(
        self, layer: nn.Module, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register the layer's parameters for a local weight of ``shape`` [out, in]."""
        ...

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Called once when all weights are loaded."""
        ...

    def apply(self, layer: nn.Module, x_TD: Tensor, bias_E: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``."""
        ...


class UnquantizedLinearMethod:
    """A weight in the model's dtype."""

    name = "unquantized"

    def __init__(self, ops: Ops) -> None:
        self._linear = ops.linear

    def create_weights(
        self, layer: nn.Module, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """One parameter, ``weight`` [out, in]."""
        weight = torch.empty(shape, dtype=dtype, device=device)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing."""

    def apply(self, layer: nn.Module, x_TD: Tensor, bias_E: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``."""
        return self._linear(x_TD, layer.weight, bias_E)  # type: ignore[arg-type]


class ExpertMethod(Protocol):
    """How a layer of experts stores its matrices and multiplies by them.

    The first dimension of every parameter is the slots of experts, so that slots can be added
    and moved. Shapes: X experts of this rank, D hidden size, F this rank's inner width,
    E = 2 F.
    """

    name: str

    def create_weights(
        self, layer: nn.Module, num_experts: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register ``gate_up`` [X, E, D], ``down`` [X, D, F] and their scales."""
        ...

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Called once when all weights are loaded."""
        ...

    def apply(
        self, layer: nn.Module, x_TD: Tensor, weights_TC: Tensor, ids_TC: Tensor
    ) -> Tensor:
        """This rank's part of the weighted sum of each token's experts, [T, D]."""
        ...


class AdapterState:
    """The adapters in the running step, as layers see them."""

    __slots__ = ("has_tokens", "is_active")

    def __init__(self) -> None:
        self.has_tokens = False
        """Whether tokens of the step have adapters."""
        self.is_active = False
        """Whether layers use the kernels that allow for adapters. In deterministic mode also in
        steps without adapters, because other kernels may round a token otherwise."""


class LoRAMethod(Protocol):
    """Adds the products of adapters to a linear layer's output."""

    @property
    def is_active(self) -> bool:
        """Whether the layer must call `apply`."""
        ...

    def apply(self, x_TD: Tensor, output_TE: Tensor) -> Tensor:
        """The output with each token's adapter added."""
        ...


class NoLoRA:
    """No adapters."""

    is_active = False

    def apply(self, x_TD: Tensor, output_TE: Tensor) -> Tensor:
        """The output, unchanged."""
        return output_TE
