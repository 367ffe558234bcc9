"""GPT-J: neighbouring dims of a head rotated, one norm before attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from trimaran.worker.models.gpt_neox import GPTNeoXForCausalLM


class GPTJForCausalLM(GPTNeoXForCausalLM):
    """GPT-J, one pipeline stage of it."""

    ignored_weights: tuple[str, ...] = (".attn.bias", ".attn.masked_bias")
    name_prefix = "transformer."
    outer_names: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "wte", "layers": "h", "norm": "ln_f", "lm_head": "lm_head",
    }  # fmt: skip
    layer_linears: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("attn.q_proj", "attention.qkv_proj", "q"),
        ("attn.k_proj", "attention.qkv_proj", "k"),
        ("attn.v_proj", "attention.qkv_proj", "v"),
        ("attn.out_proj", "attention.o_proj", ""),
        ("mlp.fc_in", "mlp.up_proj", ""),
        ("mlp.fc_out", "mlp.down_proj", ""),
    )

    def layer_norms(self) -> list[tuple[str, str]]:
        """(checkpoint name, module) of one layer's only norm."""
        return [("ln_1", "attention_norm")]
