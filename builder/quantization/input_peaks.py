"""The largest inputs of a model's products on a text, channel by channel."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from trimaran.builder.quantization.kv_calibration import read_sequence
from trimaran.builder.quantization.observed_inputs import observed_inputs
from trimaran.worker.models.interfaces import CausalLM

# Shapes: T tokens, D inner width.


@torch.inference_mode()
def input_peaks(
    model: CausalLM,
    layers: Iterable[str],
    sequences: Iterable[list[int]],
    tell: Callable[[int], None] = lambda _: None,
) -> dict[str, Tensor]:
    """Float32 [D] on the CPU: the largest magnitude of each input channel of each of the linear
    ``layers``.

    ``model`` is a whole model of floats. Each sequence of ids is read alone, in one step.
    ``tell`` hears of the number of tokens of each.
    """
    peaks = {path: _Peak() for path in layers}
    with model.unfused(), observed_inputs(model, peaks):
        for ids in sequences:
            read_sequence(model, ids)
            tell(len(ids))
    found = {path: peak.largest_D for path, peak in peaks.items()}
    return {path: each.cpu() for path, each in found.items() if each is not None}


class _Peak:
    """Keeps the largest magnitudes of a layer's inputs."""

    def __init__(self) -> None:
        self.largest_D: Tensor | None = None

    def __call__(self, x_TD: Tensor) -> None:
        mine = x_TD.abs().amax(0).float()
        self.largest_D = mine if self.largest_D is None else torch.maximum(self.largest_D, mine)
