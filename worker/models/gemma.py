"""Gemma 2 and Gemma 3 for text: norms after attention and MLP, capped scores and logits."""

from __future__ import annotations

from torch import Tensor

from trimaran.worker.attention.backend import ForwardContext
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.layers.embedding import ScaledEmbedding, VocabParallelEmbedding
from trimaran.worker.layers.linear import LayerContext
from trimaran.worker.layers.norm import RMSNorm
from trimaran.worker.layers.rotary import RotaryEmbedding
from trimaran.worker.models.llama import LlamaForCausalLM, LlamaLayer
from trimaran.worker.parallel.tensor_parallel import Addend

# Shapes: T tokens of the step, D hidden size.


class GemmaLayer(LlamaLayer):
    """One decoder layer, with a norm after each part; the following norm adds the residual."""

    def __init__(
        self,
        config: PretrainedConfig,
        context: LayerContext,
        rotary: RotaryEmbedding,
        number: int,
    ) -> None:
        super().__init__(config, context, rotary, number)
        sizes = config.hidden_size, config.norm_epsilon, config.norm_offset
        self.attention_post_norm = RMSNorm(context, *sizes)
        self.mlp_post_norm = RMSNorm(context, *sizes)

    def forward(
        self,
        hidden_TD: Addend,
        residual_TD: Tensor | None,
        positions_T: Tensor,
        kv_cache: Tensor,
        context: ForwardContext,
    ) -> tuple[Addend, Tensor]:
        """Returns the output and the residual, not added yet."""
        normed, residual = self.normalise(hidden_TD, residual_TD, context)
        residual = context.narrow(residual)
        attended = self.attention.forward(normed, None, positions_T, kv_cache, context)
        attended, _ = self.attention_post_norm.forward(attended, None)
        normed, residual = self.mlp_norm.forward(attended, residual)
        output = self.mlp.forward(normed, None)
        return self.mlp_post_norm.forward(output, None)[0], residual


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Gemma 2, one pipeline stage of it."""

    layer_class = GemmaLayer

    def make_embedding(self, vocabulary: tuple[int, int, int]) -> VocabParallelEmbedding:
        """Token embeddings, multiplied by the root of the hidden size."""
        return ScaledEmbedding(self.context, *vocabulary, scale=vocabulary[2] ** 0.5)

    def layer_norms(self) -> list[tuple[str, str]]:
        """(checkpoint name, module) of one layer's norms."""
        own = [
            ("post_attention_layernorm", "attention_post_norm"),
            ("pre_feedforward_layernorm", "mlp_norm"),
            ("post_feedforward_layernorm", "mlp_post_norm"),
        ]
        shared = [one for one in super().layer_norms() if one[0] != own[0][0]]
        return shared + own


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3, one pipeline stage of it; the differences are in its configuration."""


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The decoder of a Gemma 3 with images; weights of the image encoder are not read."""

    outer_prefix = "language_model."
