"""The models that stand for the families: small, random, and odd in what sets each apart."""

from __future__ import annotations

from typing import Any

from tests.unit.models import models


def family_configs() -> dict[str, Any]:
    """A configuration of transformers by name; the name's first word is the family."""
    llama = {"hidden_size": 72, "num_attention_heads": 12, "num_key_value_heads": 4}
    return {
        "llama": models.llama_config(**llama),
        "llama-tied-biases": models.llama_config(
            **llama, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
        ),
        "llama-one-kv-head-rope-llama3": models.llama_config(
            **{**llama, "num_key_value_heads": 1}, rope_parameters=models.LLAMA3_ROPE
        ),
        "gpt2": models.gpt2_config(n_embd=60, n_head=12),
        "gpt2-untied": models.gpt2_config(n_embd=60, n_head=12, tie_word_embeddings=False),
        **models.dense_configs(),
        **models.parallel_configs(),
        **models.expert_configs(),
        **models.latent_configs(),
    }
