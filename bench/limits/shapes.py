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
    "norm_topk_prob": False,
}

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
    "qwen3_30b": {
        **_LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "rope_theta": 1000000.0, "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
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


def shape_config(name: str, dtype: str, max_seq_len: int) -> dict[str, Any]:
    """A Hugging Face configuration of this shape.

    Raises:
        ConfigError: the shape is unknown.
    """
    if name not in SHAPES:
        raise ConfigError(f"no shape is called {name!r}; there are {', '.join(SHAPES)}")
    return {**SHAPES[name], "dtype": dtype, "max_position_embeddings": max_seq_len}


def pretrained_config(
    name: str, dtype: str = "bfloat16", max_seq_len: int = 4096
) -> PretrainedConfig:
    """The shape as engines read it; raises ConfigError."""
    return PretrainedConfig.from_huggingface(shape_config(name, dtype, max_seq_len), name)
