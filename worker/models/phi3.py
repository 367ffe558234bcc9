"""Phi 3 and 4: a Llama whose checkpoint holds query, key and value, and gate and up, as one."""

from __future__ import annotations

from typing import ClassVar

from trimaran.worker.models.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi 3 or 4, one pipeline stage of it."""

    layer_linears: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("self_attn.qkv_proj", "attention.qkv_proj", "*"),
        ("self_attn.o_proj", "attention.o_proj", ""),
        ("mlp.gate_up_proj", "mlp.gate_up_proj", "*"),
        ("mlp.down_proj", "mlp.down_proj", ""),
    )
