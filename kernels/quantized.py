"""FP8 weights and inputs as operators take them: values, scales and where blocks lie."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Shapes: T tokens, D inner width, E outputs; of scales: R rows and C columns of blocks.

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite value of e4m3."""


class BlockMap(NamedTuple):
    """The positions of the blocks of a rank's shard of a weight."""

    rows: Tensor
    """int32 [E]: the row of scales of each output."""

    size: int
    """Inputs of a block."""

    first: int
    """Place of the first input inside its block."""

    def groups(self, inner: int) -> list[slice]:
        """The inputs of each column of blocks, out of ``inner``."""
        starts = range(-self.first, inner, self.size)
        return [slice(max(start, 0), min(start + self.size, inner)) for start in starts]


class Fp8Inputs(NamedTuple):
    """How the inputs of a product are quantized."""

    scale: Tensor | None = None
    """float32 []: the scale of all inputs; None if tokens make their own."""

    bound: float = 0.0
    """Largest magnitude that makes a scale; 0: none."""

    has_power_scales: bool = False
    """Whether scales are rounded up to powers of two."""


class Fp8Weight(NamedTuple):
    """A weight in FP8."""

    values: Tensor
    """float8_e4m3fn [E, D], contiguous."""

    scales: Tensor
    """float32 [E], or with ``blocks`` [R, C]; a value times its scale is the weight."""

    blocks: BlockMap | None = None
    """None: each output has a scale. Otherwise inputs are quantized in groups that end where
    blocks do."""


class Fp8Product(Protocol):
    """A product by one weight, whose storage suits the device."""

    def __call__(self, x_TD: Tensor, bias_E: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias`` [T, E] in the dtype of ``x``, rounded once.

        Inputs are quantized, products are added up in float32.
        """
        ...
