"""Keys of Hugging Face configurations: their JSON types, their defaults and checked reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.json_types import JsonType, check_types

_LONGROPE_ONCE = ("su",)
"""Names of LongRoPE in Phi 3's earlier configurations."""

_STRETCHED = ("llama3", "yarn", "longrope", *_LONGROPE_ONCE)
"""Scalings that depend on the length of training."""

_ACTIVATIONS = {
    # Other names of the same formulas.
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
    """Dims of a head if the heads divide the hidden size evenly; raises `ConfigError`."""
    check_positive("the number of attention heads", heads)
    if hidden % heads:
        raise ConfigError(
            f"the hidden size ({hidden}) is not a multiple of the attention heads ({heads})"
        )
    return hidden // heads


def rope(values: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling, under either key; see `rotation`.

    Only for families that rotate whole heads.
    """
    base, scaling, fraction = partial_rope(values)
    if fraction != 1.0:
        raise ConfigError(
            f"partial_rotary_factor is {fraction}, which is not served. It must be 1"
        )
    return base, scaling


def partial_rope(
    values: Mapping[str, Any], fraction: float = 1.0
) -> tuple[float, dict[str, Any] | None, float]:
    """Rotary base, scaling, and the fraction of a head's dims that is rotated.

    ``fraction`` is the default. Lengths that scalings depend on are completed as
    in transformers.
    """
    scaling = rotation(values)
    base = float(scaling.pop("rope_theta", None) or values.get("rope_theta") or 10000.0)
    named = scaling.pop("partial_rotary_factor", None) or values.get("partial_rotary_factor")
    kind = scaling["rope_type"]
    if kind in _STRETCHED:
        _complete_lengths(values, scaling)
    plain = kind == "default"
    return base, None if plain else scaling, fraction if named is None else float(named)


def rotation(values: Mapping[str, Any]) -> dict[str, Any]:
    """The rotation's dictionary with its ``rope_type``: ``rope_scaling``, the older key, before
    ``rope_parameters``, as in transformers if both exist."""
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
    """Refuse keys of ``rope_parameters`` that ``rope_scaling`` would hide: a likely mistake."""
    for key in ("rope_theta", "partial_rotary_factor"):
        if newer.get(key) and not (older.get(key) or values.get(key)):
            raise ConfigError(
                f"rope_scaling stands beside rope_parameters, whose {key} ({newer[key]}) would "
                "not count then. Move what rope_scaling says into rope_parameters"
            )


def _complete_lengths(values: Mapping[str, Any], scaling: dict[str, Any]) -> None:
    """Complete the original length: from the configuration, the dictionary, or the current
    length.
    """
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
    """YaRN's factor of attention for contexts that are ``factor`` times as long."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def activation_name(name: str) -> str:
    """The engine's name of an activation."""
    return _ACTIVATIONS.get(name, name)


_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096}
_GEMMA = {"num_key_value_heads": 4, "sliding_window": 4096}
_DEFAULTS: dict[str, Mapping[str, Any]] = {
    "mistral": _MISTRAL,
    "mixtral": {"num_key_value_heads": 8, "rope_theta": 1e6},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096},
    "phi3": {"original_max_position_embeddings": 4096},
    "qwen2_moe": {"num_key_value_heads": 16, "sliding_window": 4096},
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _GEMMA,
    "gemma3": {
        **_GEMMA, "vocab_size": 262208, "num_attention_heads": 8, "head_dim": 256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "bos_token_id": 2,
        "pad_token_id": 0,
    },
    "mistral3": _MISTRAL,
    "gpt_oss": {
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rope_theta": 150000.0,
        "num_local_experts": 128, "num_experts_per_tok": 4, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "attention_bias": True, "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "deepseek_v2": {"q_lora_rank": 1536, "n_shared_experts": 2},
    "deepseek_v3": {
        "q_lora_rank": 1536, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
    },
}  # fmt: skip
"""Defaults of transformers' configuration classes, by ``model_type``, where they differ from
the common default. A key that is null counts as present."""


def with_defaults(values: Mapping[str, Any], model_type: str) -> Mapping[str, Any]:
    """``values`` with the defaults of missing keys."""
    return {**_DEFAULTS.get(model_type, {}), **values}


_NAMES: dict[JsonType, str] = {
    JsonType.INTEGER: """
        vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
        num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings
        bos_token_id pad_token_id sliding_window sliding_window_pattern max_window_layers
        n_embd n_head n_layer n_positions n_inner rotary_dim ffn_hidden_size num_kv_heads
        num_ln_in_parallel_attn num_local_experts num_experts num_experts_per_tok
        moe_intermediate_size decoder_sparse_step shared_expert_intermediate_size
        kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
        first_k_dense_replace moe_layer_freq n_routed_experts n_shared_experts n_group
        topk_group
    """,
    JsonType.NUMBER: "routed_scaling_factor",
    JsonType.POSITIVE: """
        rope_theta rope_local_base_freq rotary_emb_base rotary_pct partial_rotary_factor
        query_pre_attn_scalar
    """,
    JsonType.AMOUNT: """
        rms_norm_eps layer_norm_eps layer_norm_epsilon attn_logit_softcapping
        final_logit_softcapping swiglu_alpha swiglu_limit
    """,
    JsonType.TEXT: """
        model_type dtype torch_dtype hidden_act hidden_activation activation
        activation_function topk_method scoring_func
    """,
    JsonType.FLAG: """
        tie_word_embeddings attention_bias mlp_bias qkv_bias bias qk_layernorm
        use_sliding_window add_cross_attention scale_attn_weights
        scale_attn_by_inverse_layer_idx use_parallel_residual new_decoder_architecture
        parallel_attn multi_query alibi norm_topk_prob rope_interleave
    """,
    JsonType.OBJECT: "rope_parameters rope_scaling text_config",
    JsonType.INTEGERS: "mlp_only_layers",
    JsonType.TEXTS: "architectures layer_types",
    JsonType.INTEGER_OR_INTEGERS: "eos_token_id",
}
_ROPE_NAMES: dict[JsonType, str] = {
    JsonType.POSITIVE: """
        rope_theta factor partial_rotary_factor original_max_position_embeddings
        low_freq_factor high_freq_factor attention_factor beta_fast beta_slow
    """,
    JsonType.AMOUNT: "mscale mscale_all_dim",
    JsonType.TEXT: "type rope_type",
    JsonType.POSITIVES: "short_factor long_factor",
    JsonType.FLAG: "truncate",
    JsonType.OBJECT: "full_attention sliding_attention",
}


def _by_key(names: Mapping[JsonType, str]) -> dict[str, JsonType]:
    return {name: kind for kind, text in names.items() for name in text.split()}


_TYPES, _ROPE_TYPES = _by_key(_NAMES), _by_key(_ROPE_NAMES)
_NEVER_NULL = frozenset(
    "vocab_size hidden_size num_hidden_layers num_attention_heads max_position_embeddings "
    "max_window_layers sliding_window_pattern rms_norm_eps layer_norm_eps layer_norm_epsilon "
    "n_embd n_head n_layer n_positions".split()
)
"""Keys that transformers requires, or whose default differs from null."""


def check_huggingface_types(values: Mapping[str, Any], inside: str = "") -> None:
    """Refuse keys whose values have the wrong JSON type; most keys may be null.

    Raises:
        ConfigError: names the key and its value.
    """
    check_types(values, _TYPES, inside=inside)
    needed = {key: value for key, value in values.items() if key in _NEVER_NULL}
    check_types(needed, _TYPES, inside=inside, may_be_null=False)
    for key in ("rope_parameters", "rope_scaling"):
        check_rope_types(values.get(key) or {}, f"{inside}{key}.")
    if values.get("text_config"):
        check_huggingface_types(values["text_config"], "text_config.")


def check_rope_types(values: Mapping[str, Any], inside: str) -> None:
    """The same for a rotation's dictionary, which may hold a dictionary for each kind of layer.

    Raises:
        ConfigError: names the key and its value.
    """
    check_types(values, _ROPE_TYPES, inside=inside)
    for kind in ("full_attention", "sliding_attention"):
        if values.get(kind):
            check_rope_types(values[kind], f"{inside}{kind}.")
