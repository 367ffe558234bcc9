"""GPT-NeoX, GPT-J and Falcon: layer norm, rotary positions or ALiBi, an MLP without a gate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from trimaran.worker.attention.backend import (
    AttentionBackend,
    AttentionSpec,
    ForwardContext,
)
from trimaran.worker.attention.paged import PagedAttention
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.layers.activation import Activation
from trimaran.worker.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from trimaran.worker.layers.family_linear import (
    BiasedLMHead,
    GroupedQKVParallelLinear,
    sum_of_products,
)
from trimaran.worker.layers.linear import (
    ColumnParallelLinear,
    LayerContext,
    RowParallelLinear,
)
from trimaran.worker.layers.norm import LayerNorm
from trimaran.worker.layers.rotary import RotaryEmbedding
from trimaran.worker.models.interfaces import (
    ATTENTION_ADAPTERS,
    PLAIN_MLP_ADAPTERS,
    CausalLM,
    StageRange,
    WeightTarget,
)
from trimaran.worker.parallel.partition import DimPartition, partition_heads

# Shapes: N query heads of this rank, P positions.


def slopes(num_heads: int) -> list[float]:
    """The slope of each head's bias: its increase from one position to the next.

    A geometric sequence for a power of two. For another number of heads: the slopes of the next
    lower power, then every other slope of the next higher power. Source:
    https://arxiv.org/abs/2108.12409.
    """
    power = 2 ** int(math.log2(num_heads))
    base, between = 2.0 ** (-8 / power), 2.0 ** (-4 / power)
    own = [base**number for number in range(1, power + 1)]
    return own + [between**number for number in range(1, 2 * (num_heads - power), 2)]


def falcon_bias(
    heads: DimPartition, head_size: int, num_positions: int, device: torch.device
) -> Tensor:
    """float32 [N, P]: the bias that each head adds to the scaled scores of the key at a
    position.

    The checkpoints' own code computes slopes, positions and their product in bfloat16, whatever
    the model's dtype. This function rounds alike, because the rounding changes the scores of
    far positions. The bias includes the factor of scaled scores.
    """
    rounded = torch.tensor(slopes(heads.whole), device=device).bfloat16()
    mine = rounded.new_zeros(heads.size)
    mine[: heads.count] = rounded[heads.first : heads.first + heads.count]
    positions = torch.arange(num_positions, device=device).bfloat16()
    bias: Tensor = (mine.unsqueeze(1) * positions).float() * head_size**-0.5
    return bias


# Shapes: T tokens of the step, D hidden size, N query heads, A all heads of a token's
# product, H head size, F inner width of the MLP.


class NeoXAttention(nn.Module):
    """Self-attention up to, but without, its output projection.

    Positions are ``rotary`` or a bias [N, P] of the scores; the other is None.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        context: LayerContext,
        rotary: RotaryEmbedding | None,
        position_bias_NP: Tensor | None,
    ) -> None:
        super().__init__()
        self.head_size = config.head_size
        heads = config.num_attention_heads
        self.qkv_proj = GroupedQKVParallelLinear(
            context,
            config.hidden_size,
            config.head_size,
            heads,
            config.num_key_value_heads,
            bias=config.attn_bias,
        )
        self.o_proj = RowParallelLinear(
            context, self.qkv_proj.output_partition, config.hidden_size, bias=config.attn_bias
        )
        self.has_head_norms = config.qk_norm
        if config.qk_norm:
            self.q_norm = LayerNorm(context, config.head_size, config.norm_epsilon)
            self.k_norm = LayerNorm(context, config.head_size, config.norm_epsilon)
        # All layers share this module, which the model owns.
        self._rotary = [rotary]
        spec = AttentionSpec(scale=config.head_size**-0.5, position_bias=position_bias_NP)
        self.backend: AttentionBackend = PagedAttention(context.ops, spec)

    def attend(
        self, hidden_TD: Tensor, positions_T: Tensor, kv_cache: Tensor, context: ForwardContext
    ) -> Tensor:
        """The attention's result [T, N * H], narrowed; the input of the output projection."""
        qkv = self.qkv_proj.forward(hidden_TD)
        heads_TAH = qkv.view(qkv.shape[0], -1, self.head_size)
        rotary, num_kv = self._rotary[0], self.qkv_proj.num_kv_heads
        if self.has_head_norms:
            self.q_norm.normalise_heads(heads_TAH[:, : -2 * num_kv])
            self.k_norm.normalise_heads(heads_TAH[:, -2 * num_kv : -num_kv])
        if rotary is None:
            output_TNH = self.backend.forward(
                heads_TAH[:, : -2 * num_kv],
                heads_TAH[:, -2 * num_kv : -num_kv],
                heads_TAH[:, -num_kv:],
                kv_cache,
                context.attention,
            )
        else:
            output_TNH = self.backend.rotate_and_attend(
                heads_TAH, rotary, positions_T, kv_cache, context.attention
            )
        return context.narrow(output_TNH.flatten(1))


class NeoXMLP(nn.Module):
    """``act(up(x))``; the layer applies the second product."""

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.up_proj = ColumnParallelLinear(
            context, config.hidden_size, inner, bias=config.mlp_bias
        )
        self.act = Activation(context, config.hidden_act)
        self.down_proj = RowParallelLinear(
            context, inner, config.hidden_size, bias=config.mlp_bias
        )

    def widen(self, hidden_TD: Tensor) -> Tensor:
        """The activated product [T, F]; the input of the second product."""
        return self.act.forward(self.up_proj.forward(hidden_TD))


class NeoXLayer(nn.Module):
    """One decoder layer; the following norm adds the residual."""

    def __init__(
        self,
        config: PretrainedConfig,
        context: LayerContext,
        rotary: RotaryEmbedding | None,
        position_bias_NP: Tensor | None,
    ) -> None:
        super().__init__()
        self.is_parallel = config.parallel_residual
        self.has_mlp_norm = config.num_input_norms == 2
        self.attention_norm = LayerNorm(context, config.hidden_size, config.norm_epsilon)
        self.attention = NeoXAttention(config, context, rotary, position_bias_NP)
        if self.has_mlp_norm:
            self.mlp_norm = LayerNorm(context, config.hidden_size, config.norm_epsilon)
        self.mlp = NeoXMLP(config, context)

    def forward(
        self,
        hidden_TD: Tensor,
        residual_TD: Tensor | None,
        positions_T: Tensor,
        kv_cache: Tensor,
        context: ForwardContext,
    ) -> tuple[Tensor, Tensor]:
        """Returns the output and the residual, not added yet."""
        normed, residual = self.attention_norm.forward(hidden_TD, residual_TD)
        attended = self.attention.attend(normed, positions_T, kv_cache, context)
        normed, residual = context.narrow(normed), context.narrow(residual)
        if not self.is_parallel:
            output = self.attention.o_proj.forward(attended)
            normed, residual = self.mlp_norm.forward(output, residual)
            return self.mlp.down_proj.forward(self.mlp.widen(normed)), residual
        if self.has_mlp_norm:
            normed, residual = self.mlp_norm.forward(residual, None)
        inner = self.mlp.widen(normed)
        output = sum_of_products((self.attention.o_proj, attended), (self.mlp.down_proj, inner))
        return output, residual


class GPTNeoXForCausalLM(CausalLM):
    """GPT-NeoX, one pipeline stage of it; the base of families with the same structure."""

    name_prefix = "gpt_neox."
    outer_names: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "embed_in",
        "layers": "layers",
        "norm": "final_layer_norm",
        "lm_head": "embed_out",
    }
    """Checkpoint names of the weights outside of the layers."""

    layer_linears: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("attention.query_key_value", "attention.qkv_proj", "groups"),
        ("attention.dense", "attention.o_proj", ""),
        ("mlp.dense_h_to_4h", "mlp.up_proj", ""),
        ("mlp.dense_4h_to_h", "mlp.down_proj", ""),
    )
    """(checkpoint name, module, shard) of one layer's products."""

    adapter_modules = {**ATTENTION_ADAPTERS, **PLAIN_MLP_ADAPTERS}  # noqa: RUF012

    def __init__(
        self, config: PretrainedConfig, stage: StageRange, context: LayerContext
    ) -> None:
        super().__init__(config, stage, context)
        if config.tie_word_embeddings:
            # Some files hold a second copy of the embedding.
            head_weight = f"{self.outer_names['lm_head']}.weight"
            self.ignored_weights = (*self.ignored_weights, head_weight)

    def make_shared(self) -> None:
        """Make the angles of rotary positions, or the ALiBi bias instead."""
        config = self.config
        self.rotary: RotaryEmbedding | None = None
        self.position_bias: Tensor | None = None
        if config.position_embedding_type == "alibi_with_scale":
            heads = config.num_attention_heads, config.num_key_value_heads
            tp = self.context.tp
            self.position_bias = falcon_bias(
                partition_heads(*heads, tp.rank, tp.size).queries,
                config.head_size,
                config.max_position_embeddings,
                self.context.device,
            )
            return
        self.rotary = RotaryEmbedding(
            self.context,
            config.rotated_dims,
            config.max_position_embeddings,
            config.rotary_base,
            config.rope_scaling,
            is_neox=config.position_embedding_type != "rope_gptj",
        )

    def make_layer(self, number: int) -> nn.Module:
        """A decoder layer; all layers have the same structure."""
        return NeoXLayer(self.config, self.context, self.rotary, self.position_bias)

    def make_norm(self) -> LayerNorm:
        """The norm after the last layer."""
        return LayerNorm(self.context, self.config.hidden_size, self.config.norm_epsilon)

    def make_head(
        self, vocabulary: tuple[int, int, int], tied_to: VocabParallelEmbedding | None
    ) -> ParallelLMHead:
        """The output matrix, which may have a bias."""
        head = BiasedLMHead if self.config.lm_head_bias else ParallelLMHead
        return head(self.context, *vocabulary, tied_to=tied_to)

    def checkpoint_weights(self) -> dict[str, tuple[WeightTarget, ...]]:
        """Each weight of the whole model by its Hugging Face name, and its parameter here."""
        config, names = self.config, self.outer_names
        embedding = [WeightTarget("embed_tokens.weight")]
        if config.tie_word_embeddings:
            # A last stage without the embedding holds a copy of it as its head.
            embedding.append(WeightTarget("lm_head.weight"))
        weights = {f"{names['embed_tokens']}.weight": tuple(embedding)}
        for kind in ("weight", "bias"):
            weights[f"{names['norm']}.{kind}"] = (WeightTarget(f"norm.{kind}"),)
        if not config.tie_word_embeddings:
            weights[f"{names['lm_head']}.weight"] = (WeightTarget("lm_head.weight"),)
        if config.lm_head_bias:
            weights[f"{names['lm_head']}.bias"] = (WeightTarget("lm_head.bias"),)
        for number in range(config.num_hidden_layers):
            for name, target, shard in self._layer_weights():
                weights[f"{names['layers']}.{number}.{name}"] = (
                    WeightTarget(f"layers.{number}.{target}", shard),
                )
        return weights

    def layer_norms(self) -> list[tuple[str, str]]:
        """(checkpoint name, module) of one layer's norms."""
        return [
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "mlp_norm"),
        ]

    def _layer_weights(self) -> list[tuple[str, str, str]]:
        """(checkpoint name, parameter, shard) of one layer's weights."""
        weights = []
        for name, target in self.layer_norms():
            weights.append((f"{name}.weight", f"{target}.weight", ""))
            weights.append((f"{name}.bias", f"{target}.bias", ""))
        for name, target, shard in self.layer_linears:
            weights.append((f"{name}.weight", f"{target}.weight", shard))
            is_mlp = target.startswith("mlp")
            if self.config.mlp_bias if is_mlp else self.config.attn_bias:
                weights.append((f"{name}.bias", f"{target}.bias", shard))
        return weights


class GPTJForCausalLM(GPTNeoXForCausalLM):
    """GPT-J, one pipeline stage of it."""

    name_prefix = "transformer."
    outer_names: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "wte", "layers": "h", "norm": "ln_f", "lm_head": "lm_head",
    }  # fmt: skip
    layer_linears: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("attn.q_proj", "attention.qkv_proj", "q"),
        ("attn.k_proj", "attention.qkv_proj", "k"),
        ("attn.v_proj", "attention.qkv_proj", "v"),
        ("attn.out_proj", "attention.o_proj", ""),
        ("mlp.fc_in", "mlp.up_proj", ""),
        ("mlp.fc_out", "mlp.down_proj", ""),
    )

    def layer_norms(self) -> list[tuple[str, str]]:
        """(checkpoint name, module) of one layer's only norm."""
        return [("ln_1", "attention_norm")]


class FalconForCausalLM(GPTNeoXForCausalLM):
    """Falcon, one pipeline stage of it."""

    name_prefix = "transformer."
    outer_names: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "word_embeddings",
        "layers": "h",
        "norm": "ln_f",
        "lm_head": "lm_head",
    }
    layer_linears: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("self_attention.query_key_value", "attention.qkv_proj", "groups"),
        ("self_attention.dense", "attention.o_proj", ""),
        ("mlp.dense_h_to_4h", "mlp.up_proj", ""),
        ("mlp.dense_4h_to_h", "mlp.down_proj", ""),
    )

    def layer_norms(self) -> list[tuple[str, str]]:
        """(checkpoint name, module) of one layer's norms."""
        if self.config.num_input_norms == 1:
            return [("input_layernorm", "attention_norm")]
        if self.config.parallel_residual:
            return [("ln_attn", "attention_norm"), ("ln_mlp", "mlp_norm")]
        return super().layer_norms()
