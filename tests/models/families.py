"""The models that stand for the families: small, random, and odd in what sets each apart."""

from __future__ import annotations

from typing import Any

from transformers import Gemma3Config, Mistral3Config

from tests.unit.worker.models import models


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
        "phi3-longrope": models.longrope_config(),
        "gemma3-of-images": _gemma3_of_images(),
        "mistral3-of-images": _mistral3_of_images(),
        **models.parallel_configs(),
        **models.expert_configs(),
        **models.sink_configs(),
        **models.latent_configs(),
        **_odd_configs(),
    }


def _gemma3_of_images() -> Gemma3Config:
    """A Gemma 3 whose decoder is one of several parts."""
    images = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip
    return Gemma3Config(
        text_config=models.dense_configs()["gemma3"].to_dict(),
        vision_config=images,
        mm_tokens_per_image=4,
        image_token_index=149,
    )


def _mistral3_of_images() -> Mistral3Config:
    """A Mistral 3 whose decoder is one of several parts, with a head of its own."""
    images = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16,
              "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
              "patch_size": 8}  # fmt: skip
    return Mistral3Config(
        text_config=models.dense_configs()["mistral"].to_dict(),
        vision_config=images,
        image_token_index=149,
        tie_word_embeddings=False,
    )


def one_of_each_family() -> list[str]:
    """The first model of each kind of configuration; what is beside images is of these."""
    first: dict[type, str] = {}
    for name, config in family_configs().items():
        if not hasattr(config, "text_config"):
            first.setdefault(type(config), name)
    return list(first.values())


def _odd_configs() -> dict[str, Any]:
    """Families of each kind of attention with heads and widths that 2 and 4 do not divide."""
    heads = {"num_attention_heads": 10, "num_key_value_heads": 5, "intermediate_size": 50}
    configs = {
        "llama-odd": models.llama_config(**heads, hidden_size=70, head_dim=14),
        "gpt2-odd": models.gpt2_config(n_embd=60, n_head=5, n_inner=50),
    }
    known = {
        **models.dense_configs(), **models.parallel_configs(), **models.expert_configs(),
        **models.latent_configs(), **models.sink_configs(),
    }  # fmt: skip
    changes = {
        "qwen3": heads,
        "gemma2": {**heads, "num_key_value_heads": 1},
        "neox": {"num_attention_heads": 9, "intermediate_size": 50},
        "falcon": {"num_attention_heads": 9, "ffn_hidden_size": 50},
        "falcon-alibi": {
            "num_attention_heads": 9, "multi_query": True, "tie_word_embeddings": False
        },
        "qwen2-moe": {
            **heads, "moe_intermediate_size": 26, "shared_expert_intermediate_size": 30
        },
        "gpt-oss": {**heads, "intermediate_size": 26},
        "deepseek3": {**heads, "num_key_value_heads": 10, "moe_intermediate_size": 26},
    }  # fmt: skip
    for name, values in changes.items():
        configs[f"{name}-odd"] = type(known[name])(**{**known[name].to_dict(), **values})
    return configs
