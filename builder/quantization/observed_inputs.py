"""Linear layers that show the inputs of their products while a model reads a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trimaran.worker.layers.linear import ParallelLinear
from trimaran.worker.layers.methods import LinearMethod
from trimaran.worker.models.interfaces import CausalLM

# Shapes: T tokens, D inner width, E outputs.

Observer = Callable[[Tensor], None]
"""Takes the inputs [T, D] of one product, in the model's dtype."""


@contextmanager
def observed_inputs(model: CausalLM, observers: Mapping[str, Observer]) -> Iterator[None]:
    """Let each linear layer, named by its path in ``model``, show its inputs to an observer
    before each product."""
    before: dict[ParallelLinear, LinearMethod] = {}
    try:
        for path, observe in observers.items():
            layer = model.get_submodule(path)
            assert isinstance(layer, ParallelLinear)
            before[layer] = layer.method
            layer.method = _ObservedMethod(layer.method, observe)
        yield
    finally:
        for layer, method in before.items():
            layer.method = method


class _ObservedMethod:
    """A linear method whose inputs an observer sees."""

    name = "observed"

    def __init__(self, method: LinearMethod, observe: Observer) -> None:
        self._method = method
        self._observe = observe

    def create_weights(
        self, layer: nn.Module, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """As the observed method does."""
        self._method.create_weights(layer, shape, dtype, device)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """As the observed method does."""
        self._method.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x_TD: Tensor, bias_E: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``."""
        self._observe(x_TD)
        return self._method.apply(layer, x_TD, bias_E)
