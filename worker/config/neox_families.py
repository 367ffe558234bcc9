"""Configurations of GPT-NeoX and of families with the same structure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.huggingface_keys import (
    activation_name,
    check_positive,
    head_size_of,
    partial_rope,
    rope,
)


def from_gptj(values: Mapping[str, Any]) -> dict[str, Any]:
    """GPT-J: the configuration names the dims of the rotated part."""
    heads, hidden = values["n_head"], values["n_embd"]
    rotary_size = values.get("rotary_dim", 64)
    check_positive("rotary_dim", rotary_size)
    return {
        "hidden_size": hidden,
        "intermediate_size": values.get("n_inner") or 4 * hidden,
        "num_hidden_layers": values["n_layer"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_size": head_size_of(hidden, heads),
        "max_position_embeddings": values["n_positions"],
        "norm_epsilon": values.get("layer_norm_epsilon", 1e-5),
        "hidden_act": activation_name(values.get("activation_function", "gelu_new")),
        "position_embedding_type": "rope_gptj",
        "rotary_size": rotary_size,
        "tie_word_embeddings": bool(values.get("tie_word_embeddings", False)),
        "mlp_bias": True,
        "lm_head_bias": True,
        "parallel_residual": True,
        "num_input_norms": 1,
    }


def from_gpt_neox(values: Mapping[str, Any]) -> dict[str, Any]:
    """GPT-NeoX and Pythia: the configuration names the fraction of the rotated part."""
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    head_size = head_size_of(hidden, heads)
    # Outside of the rotation's dictionary the keys have names of this family alone.
    outside = {"rope_theta": values.get("rotary_emb_base"), "partial_rotary_factor": None}
    base, scaling, fraction = partial_rope(
        {**values, **outside}, values.get("rotary_pct", 0.25)
    )
    check_positive("rotary_pct times the head size", int(head_size * fraction))
    return {
        "hidden_size": hidden,
        "intermediate_size": values["intermediate_size"],
        "num_hidden_layers": values["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_size": head_size,
        "max_position_embeddings": values["max_position_embeddings"],
        "norm_epsilon": values.get("layer_norm_eps", 1e-5),
        "hidden_act": activation_name(values.get("hidden_act", "gelu")),
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": base,
        "rotary_size": int(head_size * fraction),
        "rope_scaling": scaling,
        "tie_word_embeddings": bool(values.get("tie_word_embeddings", False)),
        "attn_bias": bool(values.get("attention_bias", True)),
        "mlp_bias": True,
        "parallel_residual": bool(values.get("use_parallel_residual", True)),
    }


def from_falcon(values: Mapping[str, Any]) -> dict[str, Any]:
    """Falcon, in the older and the newer decoder architecture."""
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    is_new = bool(values.get("new_decoder_architecture", False))
    is_parallel = is_new or bool(values.get("parallel_attn", True))
    num_norms = values.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
    if num_norms not in ((1, 2) if is_new else (1,)):
        raise ConfigError(
            f"num_ln_in_parallel_attn is {num_norms}, which is not served. It must be 1, or 2 "
            "with new_decoder_architecture"
        )
    kv_heads = values.get("num_kv_heads") or heads
    if not is_new:
        kv_heads = 1 if values.get("multi_query", True) else heads
    base, scaling = rope(values)
    return {
        "hidden_size": hidden,
        "intermediate_size": values.get("ffn_hidden_size") or 4 * hidden,
        "num_hidden_layers": values["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_size": head_size_of(hidden, heads),
        "max_position_embeddings": values.get("max_position_embeddings", 2048),
        "norm_epsilon": values.get("layer_norm_epsilon", 1e-5),
        "hidden_act": activation_name(values.get("activation", "gelu")),
        "position_embedding_type": "alibi_with_scale"
        if values.get("alibi")
        else "rope_gpt_neox",
        "rotary_base": base,
        "rope_scaling": scaling,
        "tie_word_embeddings": bool(values.get("tie_word_embeddings", True)),
        "attn_bias": bool(values.get("bias", False)),
        "mlp_bias": bool(values.get("bias", False)),
        "parallel_residual": is_parallel,
        "num_input_norms": num_norms if is_parallel else 2,
    }


def from_phi(values: Mapping[str, Any]) -> dict[str, Any]:
    """Phi 1 and 2: half of each head is rotated unless the configuration names the fraction."""
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    head_size = head_size_of(hidden, heads)
    base, scaling, fraction = partial_rope(values, 0.5)
    check_positive("partial_rotary_factor times the head size", int(head_size * fraction))
    return {
        "hidden_size": hidden,
        "intermediate_size": values["intermediate_size"],
        "num_hidden_layers": values["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("num_key_value_heads") or heads,
        "head_size": head_size,
        "max_position_embeddings": values["max_position_embeddings"],
        "norm_epsilon": values.get("layer_norm_eps", 1e-5),
        "hidden_act": activation_name(values.get("hidden_act", "gelu_new")),
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": base,
        "rotary_size": int(head_size * fraction),
        "rope_scaling": scaling,
        "tie_word_embeddings": bool(values.get("tie_word_embeddings", False)),
        "attn_bias": True,
        "qk_norm": bool(values.get("qk_layernorm")),
        "mlp_bias": True,
        "lm_head_bias": True,
        "parallel_residual": True,
        "num_input_norms": 1,
    }
