"""From the expert that a token chose to the place where that expert is, which may change."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Shapes: T tokens of the step, X experts, P parts of the ranks, C experts of a token.

_POSITIVE = 0x7FFFFFFF


class ExpertPlaces:
    """A layer's map from experts to places, on the device and at an address that stays.

    Each token of an expert that is at several places goes to one of them, which depends on
    the token alone.
    """

    def __init__(self, num_experts: int, num_parts: int, device: torch.device) -> None:
        shape = (num_experts, num_parts)
        self._places_XP = torch.zeros(shape, dtype=torch.int32, device=device)
        self._copies_X = torch.ones(num_experts, dtype=torch.int32, device=device)

    def set(self, places_XP: NDArray[np.int64], copies_X: NDArray[np.int64]) -> None:
        """Places of each expert, and how many of them count."""
        self._places_XP.copy_(torch.from_numpy(places_XP))
        self._copies_X.copy_(torch.from_numpy(copies_X))

    def of(self, ids_TC: Tensor, logits_TX: Tensor) -> Tensor:
        """Places of the chosen experts, [T, C] int32; ``logits`` are the router's, float32."""
        ids = ids_TC.long()
        # The last bits of a sum are as good as drawn, and the same wherever the token is.
        drawn_T1 = logits_TX[:, :1].contiguous().view(torch.int32) & _POSITIVE
        copy_TC = drawn_T1 % self._copies_X[ids]
        return self._places_XP[ids, copy_TC.long()]
