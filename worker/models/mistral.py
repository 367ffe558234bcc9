"""Mistral: a Llama whose queries look back at a window of tokens."""

from __future__ import annotations

from trimaran.worker.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral, one pipeline stage of it; what differs is in its configuration."""


class Mistral3ForConditionalGeneration(MistralForCausalLM):
    """The decoder of a Mistral 3 that also takes images; what is for images is not read."""

    outer_prefix = "language_model."
