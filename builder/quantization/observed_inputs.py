"""The inputs of a model's products while the model reads a text: replaced, or measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trimaran.builder.quantization.kv_calibration import read_sequence
from trimaran.worker.layers.linear import ParallelLinear
from trimaran.worker.layers.methods import LinearMethod
from trimaran.worker.models.interfaces import CausalLM

# Shapes: T tokens, D inner width, E outputs.

Tell = Callable[[int], None]
"""Hears of the number of tokens of each sequence that was read."""


class InputMethod:
    """A linear method whose inputs [T, D] pass through a function first."""

    name = "inputs"

    def __init__(self, method: LinearMethod, change: Callable[[Tensor], Tensor]) -> None:
        self._method = method
        self._change = change

    def create_weights(
        self, layer: nn.Module, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """As the method does."""
        self._method.create_weights(layer, shape, dtype, device)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """As the method does."""
        self._method.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x_TD: Tensor, bias_E: Tensor | None) -> Tensor:
        """``change(x) @ weight.T + bias``."""
        return self._method.apply(layer, self._change(x_TD), bias_E)


@torch.inference_mode()
def input_grams(
    model: CausalLM,
    layers: Iterable[str],
    sequences: Iterable[list[int]],
    tell: Tell = lambda _: None,
) -> dict[str, Tensor]:
    """Float32 ``x.T @ x`` [D, D] of all inputs ``x`` of each of the linear ``layers``.

    ``model`` is a whole model of floats. Each sequence of ids is read alone, in one step.
    """
    grams = {path: _Gram() for path in layers}
    _read(model, grams, sequences, tell)
    return {path: gram.sums_DD for path, gram in grams.items() if gram.sums_DD is not None}


@torch.inference_mode()
def input_peaks(
    model: CausalLM,
    layers: Iterable[str],
    sequences: Iterable[list[int]],
    tell: Tell = lambda _: None,
) -> dict[str, Tensor]:
    """Float32 [D] on the CPU: the largest magnitude of each input channel of each of the linear
    ``layers``.

    ``model`` is a whole model of floats. Each sequence of ids is read alone, in one step.
    """
    peaks = {path: _Peak() for path in layers}
    _read(model, peaks, sequences, tell)
    found = {path: peak.largest_D for path, peak in peaks.items()}
    return {path: each.cpu() for path, each in found.items() if each is not None}


class _Gram:
    """Adds up the squares of a layer's inputs."""

    def __init__(self) -> None:
        self.sums_DD: Tensor | None = None

    def __call__(self, x_TD: Tensor) -> Tensor:
        floats = x_TD.float()
        if self.sums_DD is None:
            self.sums_DD = floats.new_zeros((floats.shape[1], floats.shape[1]))
        self.sums_DD.addmm_(floats.T, floats)
        return x_TD


class _Peak:
    """Keeps the largest magnitudes of a layer's inputs."""

    def __init__(self) -> None:
        self.largest_D: Tensor | None = None

    def __call__(self, x_TD: Tensor) -> Tensor:
        mine = x_TD.abs().amax(0).float()
        self.largest_D = mine if self.largest_D is None else torch.maximum(self.largest_D, mine)
        return x_TD


def _read(
    model: CausalLM,
    observers: Mapping[str, Callable[[Tensor], Tensor]],
    sequences: Iterable[list[int]],
    tell: Tell,
) -> None:
    """Read each sequence with the inputs of each layer, named by its path, shown to an
    observer."""
    with model.unfused(), _observed(model, observers):
        for ids in sequences:
            read_sequence(model, ids)
            tell(len(ids))


@contextmanager
def _observed(
    model: CausalLM, observers: Mapping[str, Callable[[Tensor], Tensor]]
) -> Iterator[None]:
    before: dict[ParallelLinear, LinearMethod] = {}
    try:
        for path, observe in observers.items():
            layer = model.get_submodule(path)
            assert isinstance(layer, ParallelLinear)
            before[layer] = layer.method
            layer.method = InputMethod(layer.method, observe)
        yield
    finally:
        for layer, method in before.items():
            layer.method = method
