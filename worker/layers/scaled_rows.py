"""Rows that are not normalised yet: the product that takes them does that."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trimaran.kernels.reference import scaled

# Shapes: T tokens of the step, D hidden size.


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """A residual [T, D], and what normalises it: a product of a row times a number is that
    number times the product, which spares a pass over the rows."""

    rows: Tensor

    scales: Tensor
    """float32."""

    def normalised(self) -> Tensor:
        """The rows [T, D] as a norm leaves them."""
        return scaled(self.rows, self.scales)


Rows = Tensor | ScaledRows
"""Rows [T, D] as they are, or still to be multiplied each by a number of its own."""
