"""Well-known model shapes, for engines with random weights."""

from __future__ import annotations

from typing import Any

from trimaran.comm.errors import ConfigError

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
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
}  # fmt: skip


def shape_config(name: str, dtype: str, max_seq_len: int) -> dict[str, Any]:
    """A Hugging Face configuration of this shape.

    Raises:
        ConfigError: no shape has this name.
    """
    if name not in SHAPES:
        raise ConfigError(f"no shape is called {name!r}; there are {', '.join(SHAPES)}")
    return {**SHAPES[name], "dtype": dtype, "max_position_embeddings": max_seq_len}
