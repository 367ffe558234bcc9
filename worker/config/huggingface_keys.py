"""Keys of Hugging Face configurations that families share, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trimaran.comm.errors import ConfigError

_LONGROPE_ONCE = ("su",)
"""What Phi 3 called LongRoPE."""

_STRETCHED = ("llama3", "yarn", "longrope", *_LONGROPE_ONCE)
"""Scalings that begin at the length that was trained on."""

_ACTIVATIONS = {
    # Other ways to write the same formulas.
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "gelu_python": "gelu",
    "swish": "silu",
}


def check_positive(name: str, value: Any) -> None:
    """Raise `ConfigError` unless a value is a whole number of 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r} but must be a whole number of 1 or more")


def head_size_of(hidden: int, heads: int) -> int:
    """Dims of a head where heads share the hidden size out; raises `ConfigError`."""
    check_positive("the number of attention heads", heads)
    if hidden % heads:
        raise ConfigError(
            f"the hidden size ({hidden}) is not a multiple of the attention heads ({heads})"
        )
    return hidden // heads


def rope(values: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling, from either spelling; see `rotation`.

    Only for families that rotate whole heads.
    """
    base, scaling, share = partial_rope(values)
    if share != 1.0:
        raise ConfigError(
            f"partial_rotary_factor is {share}, which is not served. It must be 1"
        )
    return base, scaling


def partial_rope(
    values: Mapping[str, Any], share: float = 1.0
) -> tuple[float, dict[str, Any] | None, float]:
    """Rotary base, scaling, and the share of a head's dims that is rotated.

    ``share`` is the share of a configuration that does not name it. Lengths that scalings
    depend on are completed as transformers completes them.
    """
    scaling = rotation(values)
    base = float(scaling.pop("rope_theta", None) or values.get("rope_theta") or 10000.0)
    named = scaling.pop("partial_rotary_factor", None) or values.get("partial_rotary_factor")
    kind = scaling["rope_type"]
    if kind in _STRETCHED:
        _complete_lengths(values, scaling)
    plain = kind == "default"
    return base, None if plain else scaling, share if named is None else float(named)


def rotation(values: Mapping[str, Any]) -> dict[str, Any]:
    """The dictionary of rotation with its ``rope_type``: ``rope_scaling``, as it was called
    once, before ``rope_parameters``, as transformers has it where both are there."""
    older, newer = values.get("rope_scaling"), values.get("rope_parameters")
    if older and newer:
        _refuse_lost(values, older, newer)
    scaling = dict(older or newer or {})
    for key, value in scaling.items():
        if isinstance(value, Mapping):
            raise ConfigError(
                f"rope_parameters holds a rotation of its own for {key}, which is not served "
                "for this architecture. It must hold one for all layers"
            )
    once = scaling.pop("type", None)
    return {**scaling, "rope_type": scaling.get("rope_type") or once or "default"}


def _refuse_lost(
    values: Mapping[str, Any], older: Mapping[str, Any], newer: Mapping[str, Any]
) -> None:
    """Refuse what ``rope_scaling`` would hide, though nobody adds it in order to lose that."""
    for key in ("rope_theta", "partial_rotary_factor"):
        if newer.get(key) and not (older.get(key) or values.get(key)):
            raise ConfigError(
                f"rope_scaling stands beside rope_parameters, whose {key} ({newer[key]}) would "
                "not count then. Move what rope_scaling says into rope_parameters"
            )


def _complete_lengths(values: Mapping[str, Any], scaling: dict[str, Any]) -> None:
    """The length that was trained on stands outside, or within, or is the present one."""
    longest = values["max_position_embeddings"]
    trained = values.get("original_max_position_embeddings")
    trained = trained or scaling.get("original_max_position_embeddings") or longest
    check_positive("original_max_position_embeddings", trained)
    scaling["original_max_position_embeddings"] = trained
    if scaling["rope_type"] in ("longrope", *_LONGROPE_ONCE):
        scaling["factor"] = scaling.get("factor") or longest / trained
    if scaling["rope_type"] == "yarn" and scaling.get("factor", 1.0) is None:
        scaling["factor"] = longest / trained


def yarn_scale(factor: float, weight: float) -> float:
    """What YaRN multiplies by for contexts that are ``factor`` times as long."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def activation_name(name: str) -> str:
    """Our name of an activation."""
    return _ACTIVATIONS.get(name, name)
