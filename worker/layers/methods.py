"""How a linear layer multiplies and what is added to it: quantization and LoRA methods."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from trimaran.kernels.operators import Ops


class LinearMethod(Protocol):
    """A way to hold a linear layer's weight and to multiply by it."""

    name: str

    def create_weights(
        self, layer: nn.Module, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register the layer's parameters for a local weight of ``shape`` [out, in]."""
        ...

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Called once when all weights are in place."""
        ...

    def apply(self, layer: nn.Module, x_TD: Tensor, bias_E: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``."""
        ...


class UnquantizedLinearMethod:
    """The weight as it is, in the model's dtype."""

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
        """Nothing to do."""

    def apply(self, layer: nn.Module, x_TD: Tensor, bias_E: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``."""
        return self._linear(x_TD, layer.weight, bias_E)  # type: ignore[arg-type]


class AdapterState:
    """What the layers of a model know of adapters in the step that runs."""

    __slots__ = ("has_tokens", "is_active")

    def __init__(self) -> None:
        self.has_tokens = False
        """Whether tokens of the step have adapters."""
        self.is_active = False
        """Whether layers keep the places free where adapters add: also without such tokens
        where a token's rounding may not depend on the tokens beside it."""


class LoRAMethod(Protocol):
    """What adapters add to a linear layer's output."""

    @property
    def is_active(self) -> bool:
        """False lets the layer skip the call."""
        ...

    def apply(self, x_TD: Tensor, output_TE: Tensor) -> Tensor:
        """The output with each token's adapter added."""
        ...


class NoLoRA:
    """No adapter on any token."""

    is_active = False

    def apply(self, x_TD: Tensor, output_TE: Tensor) -> Tensor:
        """The output as it is."""
        return output_TE
