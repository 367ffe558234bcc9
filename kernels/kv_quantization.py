"""KV caches of one byte a number: their dtypes, the scales of heads, and rounding."""

from __future__ import annotations

import torch
from torch import Tensor

# Shapes: T tokens, K key-value heads, H head size.

KV_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Dtypes of a quantized cache by the names of ``--kv-cache-dtype``."""

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest magnitude of a stored number. INT8 leaves out -128."""

KEY, VALUE, KEY_INVERSE, VALUE_INVERSE = range(4)
"""Rows of the scales of a layer's heads, see `head_scales`."""


def head_scales(key_K: Tensor, value_K: Tensor) -> Tensor:
    """float32 [4, K]: the scales of keys and of values, then their inverses.

    A stored number times its head's scale is the key or the value.
    """
    scales_2K = torch.stack((key_K, value_K)).float()
    return torch.cat((scales_2K, scales_2K.reciprocal())).contiguous()


def quantize_heads(x_TKH: Tensor, inverse_K: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` times the inverse scale of its head, rounded to even and clamped to ``dtype``."""
    most = LARGEST[dtype]
    scaled = (x_TKH.float() * inverse_K[:, None]).clamp(-most, most)
    return scaled.round().to(dtype) if dtype is torch.int8 else scaled.to(dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8 if a number has one byte: torch copies and gathers no FP8."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
