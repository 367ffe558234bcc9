"""Qwen 3: a Llama that normalises each query and key head before it rotates them."""

from __future__ import annotations

from trimaran.worker.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3, one pipeline stage of it; what differs is in its configuration."""
