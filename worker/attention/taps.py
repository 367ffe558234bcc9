"""Hidden states between layers, kept for a network that drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from trimaran.worker.layers.norm import add_residual
from trimaran.worker.parallel.tensor_parallel import Addend, PendingSum

# Shapes: T tokens of the step, D hidden size, X dims of all taps together.


class LayerTaps:
    """Keeps the inputs of some layers, side by side, in memory that CUDA graphs may write.

    In a pipeline each stage keeps those of its own layers beside those of earlier stages, which
    travel to the next stage with the hidden states.
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        stage: range,
    ) -> None:
        """``layers`` are numbers in the whole model, of which this rank has ``stage``; steps
        have ``max_tokens`` at most."""
        self._every = layers
        self._first = stage.start
        self.layers = tuple(layer - stage.start for layer in layers if layer in stage)
        """Indices in the stage."""
        self._width = hidden_size
        shape = max_tokens, len(layers) * hidden_size
        # Zeros, because warm-up steps leave layers out.
        self._memory = torch.zeros(shape, dtype=dtype, device=device)

    def take(self, layer: int, hidden_TD: Addend, residual_TD: Tensor | None) -> None:
        """Keep the sum of both if it is the input of a layer that is asked for, ``layer`` in
        the stage. Neither is changed. Collective over the tensor group if ``hidden`` is a sum
        that waits."""
        if layer not in self.layers:
            return
        if isinstance(hidden_TD, PendingSum):
            # The norm sums the same parts again, in place.
            hidden_TD = PendingSum(hidden_TD.addend.clone(), hidden_TD.tp)
        total_TD = add_residual(hidden_TD, residual_TD)
        for place, wanted in enumerate(self._every):
            if wanted == self._first + layer:
                first = place * self._width
                columns = slice(first, first + self._width)
                self._memory[: len(total_TD), columns].copy_(total_TD)

    @property
    def num_bytes(self) -> int:
        """Memory on the device."""
        return self._memory.nbytes

    def join(self, hidden_TD: Tensor) -> Tensor:
        """Hidden states with the inputs kept so far behind them [T, D + X], for the next
        stage."""
        return torch.cat((hidden_TD, self.states(len(hidden_TD))), dim=-1)

    def split(self, joined_TX: Tensor) -> Tensor:
        """Keep what earlier stages kept. Returns the hidden states [T, D]."""
        self.states(len(joined_TX)).copy_(joined_TX[:, self._width :])
        return joined_TX[:, : self._width].contiguous()

    def states(self, num_tokens: int) -> Tensor:
        """The last step's inputs [T, X]; the next step overwrites them."""
        return self._memory[:num_tokens]
