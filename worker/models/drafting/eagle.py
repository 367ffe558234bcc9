"""EAGLE heads: one decoder layer that predicts the target's next hidden states, and its head.

EAGLE by Li et al. (2024); EAGLE-3 by Li et al. (2025), with three hidden states of the target
and a vocabulary of its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trimaran.worker.attention.backend import ForwardContext, KVCacheSpec
from trimaran.worker.config.draft_network import EagleConfig, default_taps
from trimaran.worker.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from trimaran.worker.layers.linear import (
    ColumnParallelLinear,
    LayerContext,
    QKVParallelLinear,
)
from trimaran.worker.layers.norm import RMSNorm, add_residual
from trimaran.worker.layers.rotary import RotaryEmbedding
from trimaran.worker.models.drafting.likeliest import likeliest_ids, likely_ids, likely_scores
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.models.llama import LlamaAttention, LlamaMLP
from trimaran.worker.parallel.partition import partition_heads
from trimaran.worker.parallel.tensor_parallel import Addend

# Shapes: T tokens, N sequences, D hidden size of the head, V ids of its vocabulary.

_VOCAB_MULTIPLE = 64


class EagleLayer(nn.Module):
    """The decoder layer of a head. EAGLE-3's attention reads embedding and state side by side,
    each normalised; EAGLE-1's reads the state as it is."""

    def __init__(self, config: EagleConfig, context: LayerContext, *, is_third: bool) -> None:
        super().__init__()
        layer = config.layer
        sizes = layer.hidden_size, layer.norm_epsilon
        rotary = RotaryEmbedding(
            context,
            layer.rotary_size or layer.head_size,
            layer.max_position_embeddings,
            layer.rotary_base,
            layer.rope_scaling,
        )
        self._rotary = rotary
        self.attention = LlamaAttention(layer, context, rotary, 0)
        if is_third:
            self.attention.qkv_proj = QKVParallelLinear(
                context,
                2 * layer.hidden_size,
                layer.head_size,
                layer.num_attention_heads,
                layer.num_key_value_heads,
                bias=layer.attn_bias or layer.qkv_bias,
            )
            self.attention_norm = RMSNorm(context, *sizes)
            self.hidden_norm = RMSNorm(context, *sizes)
        self.mlp_norm = RMSNorm(context, *sizes)
        self.mlp = LlamaMLP(layer, context)
        self._is_third = is_third
        self._is_residual_normed = config.norm_before_residual

    def forward(
        self,
        embedding_TD: Tensor,
        state_TD: Tensor,
        positions_T: Tensor,
        kv_cache: Tensor,
        context: ForwardContext,
    ) -> tuple[Addend, Tensor]:
        """Returns the output, or None if it is in the residual, and the residual. ``state`` may
        be overwritten."""
        inputs, residual = state_TD, state_TD
        if self._is_third:
            normed_TD, _ = self.hidden_norm.forward(state_TD, None)
            embedding_TD, _ = self.attention_norm.forward(embedding_TD, None)
            inputs = torch.cat((embedding_TD, normed_TD), dim=-1)
            residual = normed_TD if self._is_residual_normed else state_TD
        else:
            residual = state_TD.clone()
        attended = self.attention.forward(inputs, residual, positions_T, kv_cache, context)
        normed, residual = self.mlp_norm.forward(attended, residual)
        return self.mlp.forward(normed, residual), residual


class EagleHead(nn.Module):
    """An EAGLE-3 head, or one of EAGLE-1 and 2, which differ in the tree alone."""

    is_shifted = True

    def __init__(
        self,
        config: EagleConfig,
        target: CausalLM,
        *,
        is_third: bool,
        has_embedding: bool,
        has_head: bool,
        has_bias: bool = False,
    ) -> None:
        """``has_embedding`` and ``has_head``: whether the checkpoint has its own, in place of
        the target's; ``has_bias``: whether ``fc`` has one."""
        super().__init__()
        context, layer = target.context.unquantized(), config.layer
        self.context = context
        self._config = config
        self._is_third = is_third
        self.taps = (
            (config.taps or default_taps(target.config.num_hidden_layers)) if is_third else ()
        )
        self.needs_states = not is_third
        self.state_size = layer.hidden_size
        width = config.target_hidden_size * len(self.taps)
        if not is_third:
            width = layer.hidden_size + config.target_hidden_size
        self._input_width = width
        self.fc = ColumnParallelLinear(context.alone(), width, layer.hidden_size, bias=has_bias)
        self.layer = EagleLayer(config, context, is_third=is_third)
        if is_third:
            self.norm = RMSNorm(context, layer.hidden_size, layer.norm_epsilon)
        # In lists, so that the target's weights are no parameters of the head.
        self._embedding = [] if has_embedding else [target.embed_tokens]
        self._head = [] if has_head else [target.lm_head]
        if has_embedding:
            sizes = target.config.vocab_size, target.vocab_size_padded, layer.hidden_size
            self.embed_tokens = VocabParallelEmbedding(context, *sizes)
        if has_head:
            multiple = math.lcm(_VOCAB_MULTIPLE, context.tp.size)
            padded = -(-layer.vocab_size // multiple) * multiple
            self.lm_head = ParallelLMHead(context, layer.vocab_size, padded, layer.hidden_size)
        offsets = torch.zeros(layer.vocab_size, dtype=torch.int64, device=context.device)
        self.d2t = nn.Parameter(offsets, requires_grad=False)
        """Difference of each id of the head's vocabulary to the target's id."""

        self.num_target_ids = target.config.vocab_size

    @property
    def num_draft_ids(self) -> int:
        """Ids of the head's vocabulary."""
        return self._config.layer.vocab_size

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """The entry of the one layer, in the target's dtype."""
        layer = self._config.layer
        heads = layer.num_attention_heads, layer.num_key_value_heads
        spec = KVCacheSpec(
            num_kv_heads=partition_heads(*heads, num_ranks=self.context.tp.size).keys.size,
            head_size=layer.head_size,
            dtype=self.context.dtype,
        )
        return [spec]

    def forward(
        self,
        token_ids_T: Tensor,
        states_TX: Tensor | None,
        positions_T: Tensor,
        context: ForwardContext,
    ) -> Tensor:
        """See `ChainNetwork.forward`."""
        assert states_TX is not None, "a head computes from hidden states"
        embed = self._embedding[0] if self._embedding else self.embed_tokens
        embedding_TD = embed.forward(token_ids_T)
        if not self._is_third:
            states_TX = self.fc.forward(torch.cat((embedding_TD, states_TX), dim=-1))
        elif states_TX.shape[1] == self._input_width:
            states_TX = self.fc.forward(states_TX)
        output, residual = self.layer.forward(
            embedding_TD, states_TX, positions_T, context.kv_caches[0], context
        )
        return add_residual(output, residual)

    def draft_ids(self, states_ND: Tensor) -> Tensor:
        """See `ChainNetwork.draft_ids`."""
        return likeliest_ids(self._logits(states_ND), self.d2t)

    def likely_ids(self, states_ND: Tensor, count: int) -> Tensor:
        """See `RankedNetwork.likely_ids`."""
        return likely_ids(self._logits(states_ND), count, self.d2t)

    def likely_scores(self, states_ND: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `RankedNetwork.likely_scores`."""
        return likely_scores(self._logits(states_ND), count, self.d2t)

    def _logits(self, states_ND: Tensor) -> Tensor:
        if self._is_third:
            states_ND, _ = self.norm.forward(states_ND, None)
        head = self._head[0] if self._head else self.lm_head
        return head.forward(states_ND)
