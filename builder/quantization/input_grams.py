"""The inputs of a model's products on a text, as the sums that calibrated rounding needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trimaran.builder.quantization.kv_calibration import read_sequence
from trimaran.worker.layers.linear import ParallelLinear
from trimaran.worker.layers.methods import LinearMethod
from trimaran.worker.models.interfaces import CausalLM

# Shapes: T tokens, D inner width.


@torch.inference_mode()
def input_grams(
    model: CausalLM,
    layers: Iterable[str],
    sequences: Iterable[list[int]],
    tell: Callable[[int], None] = lambda _: None,
) -> dict[str, Tensor]:
    """Float32 ``x.T @ x`` [D, D] of all inputs ``x`` of each of the linear ``layers``.

    ``model`` is a whole model of floats. Each sequence of ids is read alone, in one step.
    ``tell`` hears of the number of tokens of each.
    """
    with model.unfused(), _measured(model, layers) as methods:
        for ids in sequences:
            read_sequence(model, ids)
            tell(len(ids))
    return {path: method.gram_DD for path, method in methods.items()}


class _MeasuredMethod:
    """A linear method that adds up the squares of its inputs."""

    name = "measured"

    def __init__(self, method: LinearMethod, weight_ED: Tensor) -> None:
        self._method = method
        inner = weight_ED.shape[1]
        self.gram_DD = torch.zeros((inner, inner), device=weight_ED.device)

    def create_weights(
        self, layer: nn.Module, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """As the measured method does."""
        self._method.create_weights(layer, shape, dtype, device)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """As the measured method does."""
        self._method.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x_TD: Tensor, bias_E: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``."""
        floats = x_TD.float()
        self.gram_DD.addmm_(floats.T, floats)
        return self._method.apply(layer, x_TD, bias_E)


@contextmanager
def _measured(model: CausalLM, layers: Iterable[str]) -> Iterator[dict[str, _MeasuredMethod]]:
    """Let ``layers`` measure their inputs."""
    modules = {path: model.get_submodule(path) for path in layers}
    methods: dict[str, _MeasuredMethod] = {}
    before: dict[str, LinearMethod] = {}
    try:
        for path, module in modules.items():
            assert isinstance(module, ParallelLinear)
            before[path] = module.method
            methods[path] = _MeasuredMethod(module.method, module.weight)
            module.method = methods[path]
        yield methods
    finally:
        for path, method in before.items():
            modules[path].method = method  # type: ignore[assignment]
