"""Gemma 3, texts alone: Gemma 2 with head norms and a rotary base for layers with windows."""

from __future__ import annotations

from trimaran.worker.models.gemma2 import Gemma2ForCausalLM


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3, one pipeline stage of it; what differs is in its configuration."""
