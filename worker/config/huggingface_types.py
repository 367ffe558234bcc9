"""The JSON types of the keys of a Hugging Face ``config.json`` that families read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimaran.comm.files.json_types import JsonType, check_types

_NAMES: dict[JsonType, str] = {
    JsonType.WHOLE: """
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
        final_logit_softcapping
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
    JsonType.WHOLES: "mlp_only_layers",
    JsonType.TEXTS: "architectures layer_types",
    JsonType.WHOLE_OR_WHOLES: "eos_token_id",
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
"""Keys without which transformers makes no model, or takes a default that null is not."""


def check_huggingface_types(values: Mapping[str, Any], inside: str = "") -> None:
    """Refuse keys whose values are of another JSON type; most may be null.

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
    """The same of a rotation's dictionary, which may hold one for each kind of layer.

    Raises:
        ConfigError: names the key and its value.
    """
    check_types(values, _ROPE_TYPES, inside=inside)
    for kind in ("full_attention", "sliding_attention"):
        if values.get(kind):
            check_rope_types(values[kind], f"{inside}{kind}.")
