"""Rotary position angles: plain, linearly scaled, and Llama 3's scaling by wavelength."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.comm.errors import ConfigError
from trimaran.worker.layers.linear import LayerContext


class RotaryEmbedding(nn.Module):
    """Angles of every position, computed once in float32 and shared by all layers."""

    cos_sin: Tensor

    def __init__(
        self,
        context: LayerContext,
        head_size: int,
        max_positions: int,
        base: float,
        scaling: Mapping[str, Any] | None,
    ) -> None:
        super().__init__()
        self._ops = context.ops
        frequencies = inverse_frequencies(head_size, base, scaling).to(context.device)
        positions = torch.arange(max_positions, dtype=torch.float32, device=context.device)
        angles = torch.outer(positions, frequencies)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.register_buffer("cos_sin", table, persistent=False)

    def forward(self, heads_TNH: Tensor, positions_T: Tensor) -> None:
        """Rotate heads in place."""
        self._ops.rotate(heads_TNH, self.cos_sin, positions_T)


def inverse_frequencies(
    head_size: int, base: float, scaling: Mapping[str, Any] | None
) -> Tensor:
    """float32 [H / 2] radians per position, for a scaling as Hugging Face writes it."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    plain = 1.0 / (base**exponents)
    kind = "default" if scaling is None else str(scaling.get("rope_type", "default"))
    if scaling is None or kind == "default":
        return plain
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"partial_rotary_factor is {scaling['partial_rotary_factor']} but only 1.0, the "
            "rotation of whole heads, is served."
        )
    if kind == "linear":
        return plain / float(_required(scaling, "factor"))
    if kind == "llama3":
        return _llama3(plain, scaling)
    raise ConfigError(
        f"rope_type {kind!r} is not served. Served are default, linear and llama3."
    )


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long waves divided by ``factor``, short ones kept, a ramp between (Llama 3.1)."""
    factor = float(_required(scaling, "factor"))
    low = float(_required(scaling, "low_freq_factor"))
    high = float(_required(scaling, "high_freq_factor"))
    old_length = float(_required(scaling, "original_max_position_embeddings"))
    turns = old_length / (2 * math.pi / plain)
    ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - ramp) * plain / factor + ramp * plain


def _required(scaling: Mapping[str, Any], key: str) -> Any:
    if scaling.get(key) is None:
        raise ConfigError(
            f"rope_scaling of type {scaling.get('rope_type')!r} lacks {key!r}. Complete the "
            "checkpoint's config.json."
        )
    return scaling[key]
