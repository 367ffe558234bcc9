"""Sums over a tensor group that are made together with the norm behind them."""

from __future__ import annotations

from typing import Protocol

import torch


class SumAndNorm(Protocol):
    """Sums over a group what is to be added to a residual that is normalised next."""

    def takes(self, residual_TD: torch.Tensor) -> bool:
        """Whether it can add to such a residual; the same on all ranks."""
        ...

    def __call__(
        self, x: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add the ranks' sum of ``x`` into ``residual``, and return that RMS-normalised.

        ``x`` is this rank's addend [T, D], or float32 parts [S, T, D] of it. Collective.
        """
        ...
