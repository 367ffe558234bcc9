"""Gemma 3 for texts: Gemma 2 with head norms and a rotary base for layers with windows."""

from __future__ import annotations

from trimaran.worker.models.gemma2 import Gemma2ForCausalLM


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3, one pipeline stage of it; what differs is in its configuration."""


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The decoder of a Gemma 3 that also takes images; what is for images is not read."""

    outer_prefix = "language_model."
