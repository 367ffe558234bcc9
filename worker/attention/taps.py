"""Hidden states between layers, kept for a network that drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from trimaran.worker.layers.norm import add_residual
from trimaran.worker.parallel.tensor_parallel import Addend, PendingSum

# Shapes: T tokens of the step, D hidden size, X dims of all taps together.


class LayerTaps:
    """Keeps the inputs of some layers, side by side, in memory that CUDA graphs may write."""

    def __init__(
        self,
        layers: tuple[int, ...],
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``layers`` are numbers in the whole model; steps have ``max_tokens`` at most."""
        self.layers = layers
        self._width = hidden_size
        shape = max_tokens, len(layers) * hidden_size
        # Zeros, because warm-up steps leave layers out.
        self._memory = torch.zeros(shape, dtype=dtype, device=device)

    def take(self, layer: int, hidden_TD: Addend, residual_TD: Tensor | None) -> None:
        """Keep the sum of both if it is the input of a layer that is asked for. Neither is
        changed. Collective over the tensor group if ``hidden`` is a sum that waits."""
        if layer not in self.layers:
            return
        if isinstance(hidden_TD, PendingSum):
            # The norm sums the same parts again, in place.
            hidden_TD = PendingSum(hidden_TD.addend.clone(), hidden_TD.tp)
        total_TD = add_residual(hidden_TD, residual_TD)
        for place, wanted in enumerate(self.layers):
            if wanted == layer:
                first = place * self._width
                columns = slice(first, first + self._width)
                self._memory[: len(total_TD), columns].copy_(total_TD)

    @property
    def num_bytes(self) -> int:
        """Memory on the device."""
        return self._memory.nbytes

    def states(self, num_tokens: int) -> Tensor:
        """The last step's inputs [T, X]; the next step overwrites them."""
        return self._memory[:num_tokens]
