"""Qwen 2 and Qwen 3, dense and with a mixture of experts."""

from __future__ import annotations

from trimaran.worker.models.llama import LlamaForCausalLM
from trimaran.worker.models.mixtral import MixtralForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3, one pipeline stage of it; the differences are in its configuration."""


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2, one pipeline stage of it; the differences are in its configuration."""


class Qwen2MoeForCausalLM(MixtralForCausalLM):
    """Qwen2-MoE, one pipeline stage of it: biases as in Qwen 2, and a shared expert."""

    block = "mlp"
    projections = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}  # noqa: RUF012


class Qwen3MoeForCausalLM(Qwen2MoeForCausalLM):
    """Qwen3-MoE, one pipeline stage of it: normalised heads as in Qwen 3."""
