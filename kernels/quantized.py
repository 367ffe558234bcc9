"""Weights and inputs of one byte as operators take them: values in FP8 (e4m3) or INT8, scales
and places of blocks."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Shapes: T tokens, D inner width, E outputs; of scales: R rows and C columns of blocks.

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite value of e4m3."""

INT8 = torch.int8
"""Integers from -127 to 127, and -128 in weights."""


class BlockMap(NamedTuple):
    """The positions of the blocks of a rank's shard of a weight."""

    rows: Tensor
    """int32 [E]: the row of scales of each output."""

    size: int
    """Inputs of a block."""

    first: int
    """Place of the first input inside its block."""

    uniform: int = 1
    """Outputs that have one row of scales: those from each multiple of this number on."""

    @classmethod
    def of(cls, rows: Tensor, size: int, first: int, device: torch.device) -> BlockMap:
        """The map on a device of ``rows``, which are in the host's memory."""
        return cls(rows.to(device), size, first, _uniform(rows))

    def groups(self, inner: int) -> list[slice]:
        """The inputs of each column of blocks, out of ``inner``."""
        starts = range(-self.first, inner, self.size)
        return [slice(max(start, 0), min(start + self.size, inner)) for start in starts]


_UNIFORM = (128, 64, 32, 16)
"""Widths of tiles of outputs that kernels distinguish."""


def _uniform(rows: Tensor) -> int:
    """The widest of tiles whose outputs all have one row of scales."""
    for width in _UNIFORM:
        if all(bool((tile == tile[0]).all()) for tile in torch.split(rows, width)):
            return width
    return 1


class ByteInputs(NamedTuple):
    """How the inputs of a product are quantized."""

    scale: Tensor | None = None
    """float32 []: the scale of all inputs; None if tokens make their own."""

    bound: float = 0.0
    """Largest magnitude that makes a scale; 0: none."""

    has_power_scales: bool = False
    """Whether scales are rounded up to powers of two."""

    dtype: torch.dtype = FP8
    """That of the values: `FP8`, or `INT8` without a bound and power scales."""


class ByteWeight(NamedTuple):
    """A weight in FP8, or in INT8 without blocks."""

    values: Tensor
    """float8_e4m3fn or int8 [E, D], contiguous."""

    scales: Tensor
    """float32 [E], or with ``blocks`` [R, C]; a value times its scale is the weight."""

    blocks: BlockMap | None = None
    """None: each output has a scale. Otherwise inputs are quantized in groups that end where
    blocks do."""


GROUP = 128
"""Inputs of a token that have one scale in `ByteRows` with groups: those of one step of a
product, and those that one head of attention makes."""


class ByteRows(NamedTuple):
    """Inputs of a product that are quantized already, with a scale a token, or finer scales.

    Shapes: T tokens, D inner width, G groups of `GROUP` inputs.
    """

    values: Tensor
    """float8_e4m3fn or int8 [T, D], contiguous."""

    scales: Tensor
    """float32 [T], also if the scale is static; or with groups [G, P], of which
    [G, T] count: P is T or more, and a multiple of 8."""

    dtype: torch.dtype
    """That of the product's result."""

    @property
    def has_groups(self) -> bool:
        """Whether each group of a token's inputs has a scale."""
        return self.scales.dim() == 2


class Fp8Experts(NamedTuple):
    """A matrix of each of a rank's experts in FP8; all have one shape.

    Shapes: X experts, E outputs, D inner width.
    """

    values: Tensor
    """[X, E, D] as `Ops.fp8_expert_storage` returns them."""

    scales: Tensor
    """float32 [X, E], or with ``blocks`` [X, R, C]."""

    blocks: BlockMap | None = None
    """The blocks of each expert; the first input begins a block."""

    inputs: ByteInputs = ByteInputs()
    """How inputs are quantized; ``scale`` is None or float32 [X], a scale for each expert."""

    def of(self, expert: int) -> tuple[ByteWeight, ByteInputs]:
        """The matrix of one expert, and how its inputs are quantized."""
        scale = self.inputs.scale
        inputs = self.inputs if scale is None else self.inputs._replace(scale=scale[expert])
        return ByteWeight(self.values[expert], self.scales[expert], self.blocks), inputs


class ByteProduct(Protocol):
    """A product by one weight, whose storage suits the device.

    The methods that return None have no kernel there: the caller runs the operators one by
    one, with the same result.
    """

    def __call__(self, x_TD: Tensor | ByteRows, bias_E: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias`` [T, E] in the dtype of ``x``, rounded once.

        Inputs are quantized, products are added up in float32, those of INT8 in integers.
        `ByteRows` are those that this product made.
        """
        ...

    def parts(self, x_TD: Tensor | ByteRows) -> Tensor | None:
        """Float32 [S, T, E] whose sum over S is ``x @ weight.T``, for a norm that adds up."""
        return None

    def gated(self, x_TD: Tensor | ByteRows) -> Tensor | None:
        """``silu(x @ gate.T) * (x @ up.T)`` [T, E / 2] for a weight of gate rows above up
        rows."""
        return None

    def normalise(
        self, x: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float
    ) -> ByteRows | None:
        """The inputs that `Ops.rms_norm`, or with ``residual`` `Ops.add_rms_norm`, would
        make."""
        return None

    def grouped_inputs(self, num_rows: int) -> ByteInputs | None:
        """How a kernel may quantize so many tokens in groups for this product, or for its
        `parts` where it makes any; None if it takes no groups."""
        return None

    def activate(self, gate_up_TE: Tensor, name: str) -> ByteRows | None:
        """The inputs that the gated activation ``name`` of ``gate_up`` would make."""
        return None
