"""Falcon: one or few key-value heads, attention beside the MLP, one norm or two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from trimaran.worker.models.gpt_neox import GPTNeoXForCausalLM


class FalconForCausalLM(GPTNeoXForCausalLM):
    """Falcon, one pipeline stage of it."""

    ignored_weights: tuple[str, ...] = ("rotary_emb.inv_freq",)
    name_prefix = "transformer."
    outer_names: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "word_embeddings",
        "layers": "h",
        "norm": "ln_f",
        "lm_head": "lm_head",
    }
    layer_linears: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("self_attention.query_key_value", "attention.qkv_proj", "groups"),
        ("self_attention.dense", "attention.o_proj", ""),
        ("mlp.dense_h_to_4h", "mlp.up_proj", ""),
        ("mlp.dense_4h_to_h", "mlp.down_proj", ""),
    )

    def layer_norms(self) -> list[tuple[str, str]]:
        """(checkpoint name, module) of one layer's norms."""
        if self.config.num_input_norms == 1:
            return [("input_layernorm", "attention_norm")]
        if self.config.parallel_residual:
            return [("ln_attn", "attention_norm"), ("ln_mlp", "mlp_norm")]
        return super().layer_norms()
