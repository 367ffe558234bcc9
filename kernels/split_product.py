"""Products of few rows by torch, left as partial sums for the norm behind them to add up."""

from __future__ import annotations

import torch
from torch import Tensor

# Shapes: T tokens, D inner width, E outputs, S parts.

_TILE = 128
_MAX_TILES = 64


def num_parts(num_rows: int, outputs: int, inner: int) -> int:
    """In how many parts a product of some rows with a weight [outputs, inner] is fastest.

    A product of few tiles of outputs keeps few processors of a GPU busy, and library kernels
    that cut it add the parts in a launch of their own. Measured on an H200 for outputs 4,096
    and inner widths 4,096 and 14,336 (one row to 256: 5 to 25 % faster than whole).
    """
    tiles = -(-outputs // _TILE) * -(-num_rows // _TILE)
    parts = 1 if tiles > _MAX_TILES else 4 if num_rows <= 64 else 2
    return parts if inner % (8 * parts) == 0 else 1


def split_product(x_TD: Tensor, weight_ED: Tensor, parts: int) -> Tensor:
    """Float32 [S, T, E] whose sum over S is ``x @ weight.T``.

    bf16 or float16 on a GPU, rows contiguous, D a multiple of S.
    """
    (tokens, inner), outputs = x_TD.shape, weight_ED.shape[0]
    x_STI = x_TD.view(tokens, parts, inner // parts).transpose(0, 1)
    weight_SIE = weight_ED.view(outputs, parts, inner // parts).permute(1, 2, 0)
    return torch.bmm(x_STI, weight_SIE, out_dtype=torch.float32)
