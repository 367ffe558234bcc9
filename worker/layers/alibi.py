"""Biases of positions (ALiBi) as a Falcon adds them to its scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trimaran.worker.parallel.shares import Share

# Shapes: N query heads of this rank, P positions.


def slopes(num_heads: int) -> list[float]:
    """What each head's bias rises by from one position to the next.

    A geometric sequence for a power of two; of other numbers the next lower power's, and then
    every other one of the next higher power's. Source: https://arxiv.org/abs/2108.12409.
    """
    power = 2 ** int(math.log2(num_heads))
    base, between = 2.0 ** (-8 / power), 2.0 ** (-4 / power)
    own = [base**number for number in range(1, power + 1)]
    return own + [between**number for number in range(1, 2 * (num_heads - power), 2)]


def falcon_bias(
    heads: Share, head_size: int, num_positions: int, device: torch.device
) -> Tensor:
    """float32 [N, P]: what the heads' scaled scores of the key at a position are raised by.

    Slopes, positions and their product are bfloat16 in the checkpoints' own code, whatever
    the model's dtype: rounded so, which far positions notice. The scores' scale is in it.
    """
    rounded = torch.tensor(slopes(heads.whole), device=device).bfloat16()
    mine = rounded.new_zeros(heads.size)
    mine[: heads.count] = rounded[heads.first : heads.first + heads.count]
    positions = torch.arange(num_positions, device=device).bfloat16()
    bias: Tensor = (mine.unsqueeze(1) * positions).float() * head_size**-0.5
    return bias
