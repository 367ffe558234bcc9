"""From the expert that a token chose to the place where that expert is, which may change."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from trimaran.kernels.routing import PlaceTable

# Shapes: X experts, P parts of the ranks.


class ExpertPlaces:
    """A layer's map from experts to places, on the device and at an address that stays."""

    def __init__(self, num_experts: int, num_parts: int, device: torch.device) -> None:
        shape = (num_experts, num_parts)
        self.table = PlaceTable(
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.ones(num_experts, dtype=torch.int32, device=device),
        )

    def set(self, places_XP: NDArray[np.int64], copies_X: NDArray[np.int64]) -> None:
        """Places of each expert, and how many of them count."""
        self.table.places.copy_(torch.from_numpy(places_XP))
        self.table.num_copies.copy_(torch.from_numpy(copies_X))
