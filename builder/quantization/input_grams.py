"""The inputs of a model's products on a text, as the sums that calibrated rounding needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from trimaran.builder.quantization.kv_calibration import read_sequence
from trimaran.builder.quantization.observed_inputs import observed_inputs
from trimaran.worker.layers.linear import ParallelLinear
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
    grams = {path: _Gram(model, path) for path in layers}
    with model.unfused(), observed_inputs(model, grams):
        for ids in sequences:
            read_sequence(model, ids)
            tell(len(ids))
    return {path: gram.sums_DD for path, gram in grams.items()}


class _Gram:
    """Adds up the squares of a layer's inputs."""

    def __init__(self, model: CausalLM, path: str) -> None:
        layer = model.get_submodule(path)
        assert isinstance(layer, ParallelLinear)
        inner = layer.weight.shape[1]
        self.sums_DD = torch.zeros((inner, inner), device=layer.weight.device)

    def __call__(self, x_TD: Tensor) -> None:
        floats = x_TD.float()
        self.sums_DD.addmm_(floats.T, floats)
