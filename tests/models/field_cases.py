"""Keys of Hugging Face configurations, each with a value that most checkpoints do not have."""

from __future__ import annotations

from typing import Any

# Shapes are those of `families.family_configs`: 128 positions.

Changes = dict[str, Any]

_LINEAR = {"type": "linear", "factor": 2.5}
_DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 48,
}  # fmt: skip
_YARN = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 12,
    "beta_slow": 2, "attention_factor": 1.3,
}  # fmt: skip
_NEW_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_FACTORS = {
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * number for number in range(10)],
    "long_factor": [2.0 + 0.5 * number for number in range(10)],
}
"""Of LongRoPE, whose long factors prompts of these tests do not need."""


def _older(scaling: Changes | None, base: float = 700.0, **others: Any) -> Changes:
    """The keys of rotation as they were before ``rope_parameters``."""
    return {"rope_parameters": None, "rope_theta": base, "rope_scaling": scaling, **others}


def _newer(kind: str, base: float = 700.0, **others: Any) -> Changes:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **others}}


_ROTATIONS: dict[str, Changes] = {
    "rope_theta": _older(None),
    "rope type linear": _older(_LINEAR),
    "rope type dynamic": _older(_DYNAMIC),
    "rope type llama3": _older(_LLAMA3),
    "rope type yarn": _older(_YARN),
    "rope type yarn of mscales": _newer(
        "yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7,
        mscale_all_dim=0.9, truncate=False,
    ),
    "rope type yarn of no old length": _newer("yarn", factor=2.0),
    "rope type llama3 of no old length": _newer(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=3.0
    ),
    "rope type longrope": _newer("longrope", factor=4.0, attention_factor=1.2, **_FACTORS),
    "rope type longrope of no factor": _newer("longrope", **_FACTORS),
    "original_max_position_embeddings outside": _older(
        {**_YARN, "original_max_position_embeddings": 100}, original_max_position_embeddings=32
    ),
    "rope_type beside type": _older({**_LINEAR, "rope_type": "dynamic"}),
    "rope_scaling beside rope_parameters": {
        **_newer("dynamic", 300.0, factor=2.0), "rope_theta": 700.0, "rope_scaling": _LINEAR,
    },
    "rope type of no theta": {"rope_parameters": {"rope_type": "default"}},
}  # fmt: skip
"""Changes for families that rotate whole heads of 20."""

_GATED: dict[str, Changes] = {
    "rms_norm_eps": {"rms_norm_eps": 0.05},
    "hidden_act": {"hidden_act": "gelu_new"},
    "hidden_act of another name": {"hidden_act": "swish"},
    "tie_word_embeddings": {"tie_word_embeddings": True},
}
_WINDOWS: dict[str, Changes] = {
    "sliding_window": {"use_sliding_window": True, "sliding_window": 9, "layer_types": None},
    "max_window_layers": {
        "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1,
        "layer_types": None,
    },
    "use_sliding_window false": {
        "use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0,
        "layer_types": None,
    },
    "layer_types": {
        "use_sliding_window": True, "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}  # fmt: skip
_NEOX: dict[str, Changes] = {
    "rotation as it was": {
        "rope_parameters": None, "rotary_pct": 0.4, "rotary_emb_base": 700,
    },
    "layer_norm_eps": {"layer_norm_eps": 0.05},
    "hidden_act relu": {"hidden_act": "relu"},
    "tie_word_embeddings": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": False},
    "use_parallel_residual": {"use_parallel_residual": False},
    "rope type yarn": _newer(
        "yarn", factor=4.0, original_max_position_embeddings=32, partial_rotary_factor=0.5
    ),
    "rope type dynamic": _newer("dynamic", factor=4.0, partial_rotary_factor=0.5),
    "rope type llama3": _older(_LLAMA3, rotary_pct=0.5),
}  # fmt: skip
_MIXTURE: dict[str, Changes] = {
    "num_experts_per_tok": {"num_experts_per_tok": 1},
    "rms_norm_eps": {"rms_norm_eps": 0.05},
    "tie_word_embeddings": {"tie_word_embeddings": True},
    "rope_theta": _older(None),
}
_SPARSE: dict[str, Changes] = {
    **_MIXTURE,
    "mlp_only_layers": {"mlp_only_layers": [1, 3]},
    "decoder_sparse_step": {"decoder_sparse_step": 2},
    "norm_topk_prob": {"norm_topk_prob": True},
    "norm_topk_prob false": {"norm_topk_prob": False},
    "sliding_window": {"use_sliding_window": True, "sliding_window": 9, "layer_types": None},
}

SERVED: dict[str, dict[str, Changes]] = {
    "llama": {
        **_GATED,
        "num_key_value_heads null": {"num_key_value_heads": None},
        "rope_theta": _older(None),
        "attention_bias": {"attention_bias": True},
        "mlp_bias": {"mlp_bias": True},
        "head_dim": {"head_dim": 24},
        "pretraining_tp": {"pretraining_tp": 2},
    },
    "mistral": {
        **_GATED,
        **_ROTATIONS,
        "sliding_window null": {"sliding_window": None},
        "head_dim null": {"head_dim": None, "hidden_size": 96},
    },
    "qwen2": {**_GATED, **_WINDOWS, **_ROTATIONS, "head_dim": {"head_dim": 24}},
    "qwen3": {
        **_GATED, **_WINDOWS, "attention_bias": {"attention_bias": True},
        "rope_theta": _older(None),
    },
    "phi3": {
        **_GATED,
        "rope_theta": _older(None),
        "sliding_window": {"sliding_window": 9},
        "partial_rotary_factor": _older(None, partial_rotary_factor=0.6),
        "original_max_position_embeddings": _older(
            {"type": "longrope", **_FACTORS, "original_max_position_embeddings": 60},
            original_max_position_embeddings=64,
        ),
        "rope_scaling beside rope_parameters": {
            **_newer("longrope", **_FACTORS), "original_max_position_embeddings": 64,
            "rope_theta": 700.0,
            "rope_scaling": {**_FACTORS, "type": "su", "short_factor": [1.4] * 10},
        },
    },
    "gemma2": {
        "hidden_activation": {"hidden_activation": "gelu"},
        "query_pre_attn_scalar": {"query_pre_attn_scalar": 300},
        "attn_logit_softcapping": {"attn_logit_softcapping": None},
        "final_logit_softcapping": {"final_logit_softcapping": None},
        "attention_bias": {"attention_bias": True},
        "sliding_window": {"sliding_window": 5, "layer_types": None},
        "layer_types": {"layer_types": ["full_attention", "sliding_attention"] * 2},
        "rope_theta": _older(None),
        "rms_norm_eps": {"rms_norm_eps": 0.05},
        "tie_word_embeddings": {"tie_word_embeddings": False},
    },
    "gemma3": {
        "attention_bias": {"attention_bias": True},
        "final_logit_softcapping": {"final_logit_softcapping": 2.5},
        "query_pre_attn_scalar": {"query_pre_attn_scalar": 300},
        "sliding_window": {"sliding_window": 5},
        "rms_norm_eps": {"rms_norm_eps": 0.05},
        "tie_word_embeddings": {"tie_word_embeddings": False},
        "rotation as it was": _older(
            {"rope_type": "linear", "factor": 8.0}, 3000.0, rope_local_base_freq=50.0
        ),
        "rope_scaling beside rope_parameters": {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "original_max_position_embeddings outside": {
            "rope_parameters": {"full_attention": {**_NEW_YARN, "rope_theta": 3000.0}},
            "original_max_position_embeddings": 100,
        },
        "sliding_window_pattern": {"layer_types": None, "sliding_window_pattern": 2},
        "layer_types of all": {"layer_types": ["full_attention"] * 6},
        "hidden_activation": {"hidden_activation": "gelu"},
    },
    "mixtral": {
        **_MIXTURE, "head_dim": {"head_dim": 24}, "sliding_window": {"sliding_window": 9},
    },
    "qwen2-moe": {
        **_SPARSE, "layer_types": {"use_sliding_window": True, "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"] * 2},
        "max_window_layers": {"use_sliding_window": True, "sliding_window": 9,
        "layer_types": None, "max_window_layers": 1},
         "qkv_bias": {"qkv_bias": False},
    },
    "qwen3-moe": {**_SPARSE, "attention_bias": {"attention_bias": True}},
    "gpt-oss": {
        **_MIXTURE,
        "sliding_window": {"sliding_window": 5},
        "layer_types null": {"layer_types": None},
        "layer_types": {"layer_types": ["full_attention", "sliding_attention"] * 2},
        "attention_bias": {"attention_bias": False},
        "swiglu_alpha": {"swiglu_alpha": 3.0},
        "swiglu_limit": {"swiglu_limit": 0.2},
        "rope_parameters null": {"rope_parameters": None},
        "rope type yarn": _older({**_YARN, "truncate": False}),
        "rope type default": _newer("default"),
    },
    "gpt2": {
        "n_inner null": {"n_inner": None},
        "activation_function": {"activation_function": "relu"},
        "activation of another name": {"activation_function": "gelu_fast"},
        "layer_norm_epsilon": {"layer_norm_epsilon": 0.05},
        "tie_word_embeddings": {"tie_word_embeddings": False},
        "scale_attn_weights": {"scale_attn_weights": False},
        "scale_attn_by_inverse_layer_idx": {"scale_attn_by_inverse_layer_idx": True},
        "reorder_and_upcast_attn": {"reorder_and_upcast_attn": True},
    },
    "gptj": {
        "rotary_dim": {"rotary_dim": 4},
        "n_inner null": {"n_inner": None},
        "activation_function": {"activation_function": "gelu"},
        "layer_norm_epsilon": {"layer_norm_epsilon": 0.05},
        "tie_word_embeddings": {"tie_word_embeddings": True},
    },
    "neox": _NEOX,
    "falcon": {
        "rope_theta": _older(None),
        "rope type linear": _older(_LINEAR),
        "multi_query": {"multi_query": False},
        "parallel_attn": {"parallel_attn": False},
        "bias": {"bias": True},
        "alibi": {"alibi": True},
        "alibi of new decoders": {
            "alibi": True, "new_decoder_architecture": True, "num_kv_heads": 3,
        },
        "new_decoder_architecture": {
            "new_decoder_architecture": True, "num_kv_heads": 3, "parallel_attn": True,
        },
        "num_ln_in_parallel_attn": {
            "new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1,
        },
        "activation": {"activation": "gelu_new"},
        "ffn_hidden_size null": {"ffn_hidden_size": None},
        "layer_norm_epsilon": {"layer_norm_epsilon": 0.05},
        "tie_word_embeddings": {"tie_word_embeddings": False},
    },
    "phi": {
        "qk_layernorm": {"qk_layernorm": True},
        "partial_rotary_factor": _older(None, partial_rotary_factor=0.4),
        "rope type linear": _older(_LINEAR, partial_rotary_factor=0.5),
        "hidden_act": {"hidden_act": "gelu"},
        "num_key_value_heads null": {"num_key_value_heads": None},
        "layer_norm_eps": {"layer_norm_eps": 0.05},
        "tie_word_embeddings": {"tie_word_embeddings": True},
    },
    "deepseek2": {
        "q_lora_rank null": {"q_lora_rank": None},
        "first_k_dense_replace": {"first_k_dense_replace": 0},
        "routed_scaling_factor": {"routed_scaling_factor": 0.5},
        "topk_method": {"topk_method": "greedy"},
        "topk_group": {"topk_group": 3},
        "rms_norm_eps": {"rms_norm_eps": 0.05},
        "tie_word_embeddings": {"tie_word_embeddings": True},
        "n_shared_experts": {"n_shared_experts": 1},
        "attention_bias": {"attention_bias": False},
        "rope_theta": _older(None),
        "rope type yarn of one mscale": _newer(
            "yarn", factor=4.0, original_max_position_embeddings=32, mscale_all_dim=0.8
        ),
        "rope type yarn of an attention factor": _newer(
            "yarn", factor=4.0, original_max_position_embeddings=32, mscale_all_dim=0.8,
            mscale=0.5, attention_factor=1.4,
        ),
    },
    "deepseek3": {
        "rope_interleave": {"rope_interleave": False},
        "norm_topk_prob": {"norm_topk_prob": False},
        "routed_scaling_factor": {"routed_scaling_factor": 0.5},
        "topk_group": {"topk_group": 3},
        "n_shared_experts": {"n_shared_experts": 1},
        "first_k_dense_replace": {"first_k_dense_replace": 2},
        "rms_norm_eps": {"rms_norm_eps": 0.05},
        "tie_word_embeddings": {"tie_word_embeddings": True},
        "q_lora_rank null": {"q_lora_rank": None},
        "attention_bias": {"attention_bias": True},
        "rope_theta": _older(None),
    },
}  # fmt: skip
"""By model and key: changes of its ``config.json`` that must mean what transformers takes them
to mean."""

REFUSED: list[tuple[str, Changes, str]] = [
    ("llama", _older(None, partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    ("llama", _newer("proportional"), "rope_type is 'proportional'"),
    ("llama", {"hidden_act": "relu2"}, "hidden_act is 'relu2'"),
    ("gemma2", {"hidden_activation": "mish"}, "hidden_activation is 'mish' but must be one of"),
    ("gpt2", {"activation_function": "silu"}, "activation_function is 'silu'"),
    ("falcon", {"activation": "silu"}, "json: activation is 'silu'"),
    ("qwen2", {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
    (
        "qwen2",
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}},
        "rope_parameters holds a rotation of its own for full_attention",
    ),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    ("gemma3", {"attn_logit_softcapping": 1.5}, "attn_logit_softcapping is 1.5"),
    (
        "gemma3",
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        "rope_scaling has the type 'linear'",
    ),
    (
        "gemma3",
        {"rope_parameters": {"sliding_attention": {"type": "linear", "factor": 8.0}}},
        "sliding_attention have the rope_type 'linear'",
    ),
    (
        "llama",
        {**_newer("default"), "rope_scaling": _LINEAR},
        "rope_scaling stands beside rope_parameters, whose rope_theta \\(700.0\\)",
    ),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is true"),
    ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2"),
    ("mixtral", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("qwen2-moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("qwen3-moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("gpt-oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("gpt-oss", {"swiglu_limit": 0.0}, "swiglu_limit is 0.0"),
    ("deepseek2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("deepseek2", {"mlp_bias": True}, "mlp_bias is true"),
    ("deepseek2", {"norm_topk_prob": True}, "norm_topk_prob is true"),
    ("deepseek3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
]
"""Model, changes, and a part of the refusal."""

SIZES = set(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads max_position_embeddings n_positions n_embd n_layer n_head "
    "moe_intermediate_size shared_expert_intermediate_size num_experts num_local_experts "
    "n_routed_experts n_group kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
    "num_experts_per_tok head_dim".split()
)
"""Keys that every model of `families.family_configs` has at odd values."""

WITHOUT_EFFECT = set(
    # Keys of training alone.
    "initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop "
    "classifier_dropout router_aux_loss_coef router_jitter_noise num_mtp_layers "
    # Keys of heads other than the language head, and of returned values.
    "summary_type summary_use_proj summary_activation summary_proj_to_labels "
    "summary_first_dropout output_router_logits use_cache is_decoder "
    # Keys for requests, which set their own end ids; transformers does not read the others.
    "bos_token_id eos_token_id pad_token_id pretraining_tp".split()
)
"""Keys that change no logits of a decoder."""
