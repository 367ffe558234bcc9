"""Well-known model shapes, for engines with random weights."""

from __future__ import annotations

from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.pretrained_config import PretrainedConfig

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
}

_DEEPSEEK = {
    **_LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "rope_theta": 10000.0,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
}

_QWEN3_MOE = {
    **_LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
    "rope_theta": 1000000.0, "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_LLAMA, "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "tiny_experts": {
        **_LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
        "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 704,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "llama1b": {
        **_LLAMA, "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    "llama8b": {
        **_LLAMA, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "mixtral": {
        **_LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
        "rope_theta": 1000000.0, "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "llama70b": {
        **_LLAMA, "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3_30b": _QWEN3_MOE,
    "qwen3_30b_16l": {**_QWEN3_MOE, "num_hidden_layers": 16},
    "qwen25_7b": {
        **_LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "vocab_size": 152064,
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "use_sliding_window": False,
    },
    "gemma2_9b": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 256000, "hidden_size": 3584, "intermediate_size": 14336,
        "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "phi3_mini": {
        **_LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3",
        "rope_theta": 10000.0, "vocab_size": 32064, "hidden_size": 3072,
        "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "sliding_window": 2047, "pad_token_id": 32000,
    },
    "tiny_latent": {
        **_DEEPSEEK, "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408,
        "num_hidden_layers": 8, "num_attention_heads": 8, "kv_lora_rank": 128,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
        "n_routed_experts": 16, "moe_intermediate_size": 256, "num_experts_per_tok": 4,
    },
    "deepseek_lite": {
        **_DEEPSEEK, "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
        "num_hidden_layers": 27, "num_attention_heads": 16, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "moe_intermediate_size": 1408, "num_experts_per_tok": 6,
    },
}  # fmt: skip


def shape_config(
    name: str, dtype: str, max_seq_len: int, layers: int | None = None
) -> dict[str, Any]:
    """A Hugging Face configuration of this shape, cut to its first ``layers``.

    Raises:
        ConfigError: the shape is unknown or has fewer layers.
    """
    if name not in SHAPES:
        raise ConfigError(f"no shape is called {name!r}; there are {', '.join(SHAPES)}")
    whole: int = SHAPES[name]["num_hidden_layers"]
    if layers is not None and layers > whole:
        raise ConfigError(
            f"--layers {layers} is above the {whole} layers of {name}: name {whole} or fewer"
        )
    return {
        **SHAPES[name],
        "dtype": dtype,
        "max_position_embeddings": max_seq_len,
        "num_hidden_layers": layers or whole,
    }


def pretrained_config(
    name: str, dtype: str = "bfloat16", max_seq_len: int = 4096, layers: int | None = None
) -> PretrainedConfig:
    """The shape as engines read it; raises ConfigError."""
    values = shape_config(name, dtype, max_seq_len, layers)
    return PretrainedConfig.from_huggingface(values, name)
