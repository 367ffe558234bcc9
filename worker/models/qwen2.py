"""Qwen 2 and 2.5: a Llama whose query, key and value projections have biases."""

from __future__ import annotations

from trimaran.worker.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2, one pipeline stage of it; what differs is in its configuration."""
