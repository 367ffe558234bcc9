"""Rotary positions: their angles, plain or scaled for longer contexts, and the rotation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.comm.errors import ConfigError
from trimaran.kernels.attention import HeadNorms
from trimaran.worker.config.huggingface_keys import yarn_scale
from trimaran.worker.layers.linear import LayerContext

# Shapes: T tokens, K key-value heads, A all heads (queries, keys, values), H head size, R
# rotated dims of a head.


class RotaryEmbedding(nn.Module):
    """Angles of every position, computed once in float32 and shared by all layers.

    The first ``rotary_size`` dims of a head are rotated: its halves against each other with
    ``is_neox`` (GPT-NeoX, Llama), else neighbouring dims (GPT-J).

    With LongRoPE, sequences of more than ``switch_at`` tokens have other angles. The angles of
    their position p are in row ``switch_at + p``, and the runner shifts their positions
    accordingly. 0 if all sequences have the same angles.
    """

    cos_sin: Tensor

    def __init__(
        self,
        context: LayerContext,
        rotary_size: int,
        max_positions: int,
        base: float,
        scaling: Mapping[str, Any] | None,
        *,
        is_neox: bool = True,
        switch_at: int = 0,
    ) -> None:
        """``switch_at`` may also come from another rotation of the model, whose layers get the
        same positions."""
        super().__init__()
        self.is_neox = is_neox
        self._ops = context.ops
        longest = context.max_seq_len or max_positions
        short_length = _short_length(scaling)
        self.switch_at = switch_at or (short_length if longest > short_length else 0)
        spans = [
            (length, inverse_frequencies(rotary_size, base, scaling, is_long=is_long))
            for length, is_long in (
                (self.switch_at, False),
                (max_positions, self.switch_at > 0),
            )
        ]
        table = _angle_table(context.device, spans, amplitude(scaling))
        self.register_buffer("cos_sin", table, persistent=False)

    def forward(
        self,
        heads_TAH: Tensor,
        positions_T: Tensor,
        kv_cache: Tensor,
        slots_T: Tensor,
        scales_4K: Tensor | None = None,
        norms: HeadNorms | None = None,
    ) -> None:
        """Rotate query and key heads in place, behind their ``norms`` if any, and store keys
        and values at their slots.

        ``heads`` holds the queries, then the K keys and K values that ``kv_cache`` takes.
        ``scales`` are those of a quantized cache.
        """
        self._ops.rope_and_cache(
            heads_TAH,
            self.cos_sin,
            positions_T,
            kv_cache,
            slots_T,
            self.is_neox,
            scales_4K,
            norms,
        )

    def rotates_whole_heads(self, head_size: int) -> bool:
        """Whether all dims of a head are rotated, as halves against each other."""
        return self.is_neox and self.cos_sin.shape[1] == head_size


def _angle_table(
    device: torch.device, spans: Sequence[tuple[int, Tensor]], factor: float
) -> Tensor:
    """float32 [P, R]: cosines, then sines, of the angles of all positions, times ``factor``.

    Each span has a number of positions, counted from 0, and frequencies [R / 2].
    """
    if device.type == "meta":
        # A model on the meta device needs the shape alone. To compute it, torch would import
        # its compiler, which takes seconds.
        num_positions = sum(length for length, _ in spans)
        return torch.empty(num_positions, 2 * len(spans[0][1]), device=device)
    angles = torch.cat(
        [
            torch.outer(
                torch.arange(length, dtype=torch.float32, device=device),
                frequencies.to(device),
            )
            for length, frequencies in spans
        ]
    )
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * factor


def inverse_frequencies(
    rotary_size: int,
    base: float,
    scaling: Mapping[str, Any] | None,
    *,
    is_long: bool = False,
) -> Tensor:
    """float32 [R / 2] radians per position, for a scaling in Hugging Face's format.

    ``is_long`` asks for the frequencies of LongRoPE's long sequences.
    """
    exponents = torch.arange(0, rotary_size, 2, dtype=torch.int64).float() / rotary_size
    plain = 1.0 / (base**exponents)
    kind = "default" if scaling is None else str(scaling.get("rope_type", "default"))
    # Dynamic scaling begins after the last position that is served.
    if scaling is None or kind in ("default", "dynamic"):
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
    if kind == "yarn":
        return _yarn(plain, rotary_size, base, scaling)
    if kind == "longrope":
        return _longrope(plain, scaling, is_long=is_long)
    raise ConfigError(
        f"rope_type {kind!r} is not served. Served are default, linear, dynamic, llama3, "
        "yarn and longrope."
    )


def amplitude(scaling: Mapping[str, Any] | None) -> float:
    """The factor of cosines and sines: 1, except with YaRN and LongRoPE."""
    kind = None if scaling is None else scaling.get("rope_type")
    if scaling is None or kind not in ("yarn", "longrope"):
        return 1.0
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor = float(_required(scaling, "factor"))
    if kind == "longrope":
        old_length = float(_required(scaling, "original_max_position_embeddings"))
        return math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(old_length))
    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if above and below:
        return yarn_scale(factor, above) / yarn_scale(factor, below)
    return yarn_scale(factor, 1.0)


def _yarn(plain: Tensor, size: int, base: float, scaling: Mapping[str, Any]) -> Tensor:
    """Low frequencies divided by ``factor``, high ones kept, a ramp in between (YaRN).

    Source: https://arxiv.org/abs/2309.00071, with bounds rounded as Hugging Face does.
    """
    factor = float(_required(scaling, "factor"))
    old_length = float(_required(scaling, "original_max_position_embeddings"))

    def dim_of(turns: float) -> float:
        """The dim whose wave makes ``turns`` rotations over the original length."""
        return size * math.log(old_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = dim_of(float(scaling.get("beta_fast") or 32))
    high = dim_of(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(size // 2).float() - low) / (high - low)).clamp(0.0, 1.0)
    kept = 1 - ramp
    return plain / factor * (1 - kept) + plain * kept


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Low frequencies divided by ``factor``, high ones kept, a ramp in between (Llama 3.1)."""
    factor = float(_required(scaling, "factor"))
    low = float(_required(scaling, "low_freq_factor"))
    high = float(_required(scaling, "high_freq_factor"))
    old_length = float(_required(scaling, "original_max_position_embeddings"))
    turns = old_length / (2 * math.pi / plain)
    ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - ramp) * plain / factor + ramp * plain


def _short_length(scaling: Mapping[str, Any] | None) -> int:
    """Tokens up to which LongRoPE's short factors hold; 0 for scalings with one set."""
    if scaling is None or scaling.get("rope_type") != "longrope":
        return 0
    return int(_required(scaling, "original_max_position_embeddings"))


def _longrope(plain: Tensor, scaling: Mapping[str, Any], *, is_long: bool) -> Tensor:
    """Each frequency divided by its own factor (LongRoPE, Phi 3 and 4).

    Source: https://arxiv.org/abs/2402.13753.
    """
    key = "long_factor" if is_long else "short_factor"
    factors = torch.tensor(_required(scaling, key), dtype=torch.float32)
    if factors.shape != plain.shape:
        raise ConfigError(
            f"{key} of rope_scaling has {factors.numel()} numbers, but {2 * plain.numel()} "
            f"dims of a head are rotated, so it must have {plain.numel()}. Correct the "
            "checkpoint's config.json."
        )
    return plain / factors


def _required(scaling: Mapping[str, Any], key: str) -> Any:
    if scaling.get(key) is None:
        raise ConfigError(
            f"rope_scaling of type {scaling.get('rope_type')!r} lacks {key!r}. Complete the "
            "checkpoint's config.json."
        )
    return scaling[key]
