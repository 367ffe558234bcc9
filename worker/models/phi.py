"""Phi 1 and 2, with the structure of GPT-NeoX, and Phi 3 and 4, with that of Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from trimaran.worker.models.gpt_neox import GPTNeoXForCausalLM
from trimaran.worker.models.llama import LlamaForCausalLM


class PhiForCausalLM(GPTNeoXForCausalLM):
    """Phi 1 or 2, one pipeline stage of it."""

    name_prefix = "model."
    outer_names: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "embed_tokens",
        "layers": "layers",
        "norm": "final_layernorm",
        "lm_head": "lm_head",
    }
    layer_linears: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("self_attn.q_proj", "attention.qkv_proj", "q"),
        ("self_attn.k_proj", "attention.qkv_proj", "k"),
        ("self_attn.v_proj", "attention.qkv_proj", "v"),
        ("self_attn.dense", "attention.o_proj", ""),
        ("mlp.fc1", "mlp.up_proj", ""),
        ("mlp.fc2", "mlp.down_proj", ""),
    )

    def layer_norms(self) -> list[tuple[str, str]]:
        """(checkpoint name, module) of one layer's norms."""
        norms = [("input_layernorm", "attention_norm")]
        if self.config.qk_norm:
            norms.append(("self_attn.q_layernorm", "attention.q_norm"))
            norms.append(("self_attn.k_layernorm", "attention.k_norm"))
        return norms


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi 3 or 4, one pipeline stage of it."""

    layer_linears: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("self_attn.qkv_proj", "attention.qkv_proj", "*"),
        ("self_attn.o_proj", "attention.o_proj", ""),
        ("mlp.gate_up_proj", "mlp.gate_up_proj", "*"),
        ("mlp.down_proj", "mlp.down_proj", ""),
    )
