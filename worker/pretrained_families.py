"""Each served family's Hugging Face configuration, in the words of `PretrainedConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trimaran.comm.errors import ConfigError

GATED_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh")
PLAIN_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu")


@dataclass(frozen=True, slots=True)
class Family:
    """What is to be known of an architecture before any model of it is made."""

    model_type: str
    """Hugging Face's name, for a configuration that names no architecture."""

    convert: Callable[[Mapping[str, Any]], dict[str, Any]]
    """From Hugging Face's keys to fields of `PretrainedConfig`; raises KeyError for a key
    that is missing, and `ConfigError` for a value that is not served."""

    activations: tuple[str, ...]
    """Values of ``hidden_act`` that its MLP serves."""


def check_positive(name: str, value: Any) -> None:
    """Raise `ConfigError` unless a value is a whole number of 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r} but must be a whole number of 1 or more")


def rope(values: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling, from either spelling: `rope_parameters` or `rope_scaling`.

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

    ``share`` is the share of a configuration that does not name it.
    """
    scaling = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    base = float(scaling.pop("rope_theta", None) or values.get("rope_theta") or 10000.0)
    named = scaling.pop("partial_rotary_factor", None) or values.get("partial_rotary_factor")
    scaling["rope_type"] = scaling.pop("type", None) or scaling.get("rope_type") or "default"
    plain = scaling["rope_type"] == "default"
    return base, None if plain else scaling, share if named is None else float(named)


def _from_llama(values: Mapping[str, Any]) -> dict[str, Any]:
    heads = values["num_attention_heads"]
    check_positive("num_attention_heads", heads)
    rotary_base, rope_scaling = rope(values)
    return {
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["intermediate_size"],
        "num_hidden_layers": values["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("num_key_value_heads") or heads,
        "head_size": values.get("head_dim") or values["hidden_size"] // heads,
        "max_position_embeddings": values["max_position_embeddings"],
        "norm_epsilon": values["rms_norm_eps"],
        "hidden_act": values.get("hidden_act", "silu"),
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": rotary_base,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": bool(values.get("tie_word_embeddings", False)),
        "attn_bias": bool(values.get("attention_bias", False)),
        "mlp_bias": bool(values.get("mlp_bias", False)),
    }


def _from_gpt2(values: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = values["n_head"], values["n_embd"]
    check_positive("n_head", heads)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if values.get(name):
            raise ConfigError(
                f"{name} is true, which is not served for GPT-2. It must be false"
            )
    if values.get("scale_attn_weights") is False:
        raise ConfigError("scale_attn_weights is false, which is not served. It must be true")
    if hidden % heads:
        raise ConfigError(f"n_embd ({hidden}) is not a multiple of n_head ({heads})")
    return {
        "hidden_size": hidden,
        "intermediate_size": values.get("n_inner") or 4 * hidden,
        "num_hidden_layers": values["n_layer"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_size": hidden // heads,
        "max_position_embeddings": values["n_positions"],
        "norm_epsilon": values.get("layer_norm_epsilon", 1e-5),
        "hidden_act": values.get("activation_function", "gelu_new"),
        "position_embedding_type": "learned_absolute",
        "tie_word_embeddings": bool(values.get("tie_word_embeddings", True)),
        "attn_bias": True,
        "mlp_bias": True,
    }


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _from_llama, GATED_ACTIVATIONS),
    "GPT2LMHeadModel": Family("gpt2", _from_gpt2, PLAIN_ACTIVATIONS),
}
"""By architecture, as `config.json` names it."""
