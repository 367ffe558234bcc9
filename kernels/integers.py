"""Weights of unsigned integers or FP4 codes as operators take them: values, scales, groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Shapes: T tokens, D inner width, E outputs, G groups of inputs, X slots of experts.


class Groups(NamedTuple):
    """The inputs that share a scale."""

    size: int
    """Inputs of a group; consecutive unless ``of_inputs`` is there."""

    first: int = 0
    """Place of the first input inside its group."""

    of_inputs: Tensor | None = None
    """int32 [D]: the group of each input, in any order."""

    def numbers(self, inner: int, device: torch.device) -> Tensor:
        """int64 [D]: the group of each of ``inner`` inputs."""
        if self.of_inputs is not None:
            return self.of_inputs.to(device, torch.int64)
        inputs: Tensor = torch.arange(inner, device=device) + self.first
        return inputs // self.size


FP4_NUMBERS = (
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
)  # fmt: skip
"""The number of each code of FP4 (E2M1: a sign, two bits of exponent, one of mantissa).

Source: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""


class IntegerWeight(NamedTuple):
    """A weight of unsigned integers of 4 or 8 bits, or of codes of FP4 numbers.

    A value is ``(integer - zero) * scale``, or ``integer * scale + minimum``, or the number of
    a code times ``scale``.
    """

    values: Tensor
    """uint8 [E, D], or for 4 bits [E, D / 2], the even input in the low half of a byte."""

    scales: Tensor
    """float32 [E, G]."""

    groups: Groups
    bits: int
    zeros: Tensor | None = None
    """int16 [E, G]; None without minimums: half of the range."""

    minimums: Tensor | None = None
    """float32 [E, G]."""

    is_fp4: bool = False
    """Whether the 4 bits are codes of `FP4_NUMBERS`; then there are no zeros and minimums."""

    input_scale: Tensor | None = None
    """float32 []: the scale of inputs of signed bytes; None: each token has one."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.values.shape[0], self.values.shape[1] * (8 // self.bits)

    @property
    def half(self) -> int:
        """The integer that stands for zero without zero points."""
        return 1 << (self.bits - 1)

    def outputs(self, part: slice) -> IntegerWeight:
        """Some outputs of the weight."""
        return self._replace(
            values=self.values[part],
            scales=self.scales[part],
            zeros=None if self.zeros is None else self.zeros[part],
            minimums=None if self.minimums is None else self.minimums[part],
        )


class IntegerProduct(Protocol):
    """A product by one weight of integers, whose storage suits the device."""

    @property
    def nbytes(self) -> int:
        """Memory of the weight."""
        ...

    def __call__(
        self, x_TD: Tensor, bias_E: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """``x @ weight.T + bias`` [T, E] in the dtype of ``x``, or ``dtype``: float32.

        Products are added up in float32 or in integers.
        """
        ...

    def gated(self, x_TD: Tensor) -> Tensor | None:
        """``silu(x @ gate.T) * (x @ up.T)`` [T, E / 2] of a weight with gate rows above up
        rows, where that is one kernel; otherwise None."""
        ...


_TENSORS = ("values", "scales", "zeros", "groups", "order")
"""Those of `IntegerExperts`."""


class Packing(NamedTuple):
    """How `IntegerExperts` are packed in units of a Hopper kernel; see
    ``cuda/integer_units.py``."""

    outputs: int
    """Outputs of an expert's matrix; those that fill the last units are arbitrary."""

    has_zeros: bool
    scales: int
    """The kind of scales in a unit."""


class IntegerExperts(NamedTuple):
    """A matrix of each of a rank's experts in integers, stored as the device's products read
    them; all have one shape.

    The first dimension of every tensor is the slots of experts, so that slots can be added and
    moved. What the tensors hold is the business of the operators that made them.
    """

    values: Tensor
    """uint8 [X, ...]: the integers; on a CPU all of an expert."""

    scales: Tensor | None
    zeros: Tensor | None
    groups: Tensor | None
    """int32: the groups of inputs or of steps."""

    order: Tensor | None
    """int32: the inputs by groups; None: as they are."""

    bits: int
    step: int = 1
    """Inputs that share a scale and are multiplied at once."""

    is_fp4: bool = False
    """Whether integers are codes of `FP4_NUMBERS`."""

    packing: Packing | None = None
    """Set where ``values`` alone hold all, in units [X, N, C, bytes of a unit]."""

    @property
    def num_outputs(self) -> int:
        """Outputs of an expert's matrix, stored for a GPU."""
        return int(self.values.shape[1]) if self.packing is None else self.packing.outputs

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that there are, by their names."""
        found = {name: getattr(self, name) for name in _TENSORS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> IntegerExperts:
        """The same experts in other tensors, by the names of `tensors`."""
        get = tensors.get
        return self._replace(
            values=tensors["values"], scales=get("scales"), zeros=get("zeros"),
            groups=get("groups"), order=get("order"),
        )  # fmt: skip
