"""What keys mean that a ``config.json`` leaves out, where that is no error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    "deepseek_v2": {"q_lora_rank": 1536, "n_shared_experts": 2},
    "deepseek_v3": {
        "q_lora_rank": 1536, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
    },
}  # fmt: skip
"""By ``model_type``: values of transformers' own configuration classes that differ from what
the key's absence would mean in other families. A key that is null is not left out."""


def with_defaults(values: Mapping[str, Any], model_type: str) -> Mapping[str, Any]:
    """``values`` with what they leave out."""
    return {**_DEFAULTS.get(model_type, {}), **values}
