"""GPT-2: learned positions, layer norm, biases in all products."""

from __future__ import annotations

from torch import Tensor, nn

from trimaran.worker.attention.backend import (
    AttentionBackend,
    ForwardContext,
    attention_spec,
)
from trimaran.worker.attention.paged import PagedAttention
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.layers.activation import Activation
from trimaran.worker.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from trimaran.worker.layers.linear import (
    ColumnParallelLinear,
    LayerContext,
    QKVParallelLinear,
    RowParallelLinear,
)
from trimaran.worker.layers.norm import LayerNorm
from trimaran.worker.models.interfaces import (
    ATTENTION_ADAPTERS,
    PLAIN_MLP_ADAPTERS,
    CausalLM,
    WeightTarget,
)

# Shapes: T tokens of the step, D hidden size, N heads, H head size.

# (checkpoint name, parameter, shard, whether the checkpoint holds it as [in, out])
_LAYER_WEIGHTS = (
    ("ln_1", "attention_norm", "", False),
    ("ln_2", "mlp_norm", "", False),
    ("attn.c_attn", "attention.qkv_proj", "*", True),
    ("attn.c_proj", "attention.o_proj", "", True),
    ("mlp.c_fc", "mlp.up_proj", "", True),
    ("mlp.c_proj", "mlp.down_proj", "", True),
)


class GPT2Attention(nn.Module):
    """Self-attention."""

    def __init__(self, config: PretrainedConfig, context: LayerContext, number: int) -> None:
        super().__init__()
        self.head_size = config.head_size
        heads = config.num_attention_heads
        self.qkv_proj = QKVParallelLinear(
            context, config.hidden_size, config.head_size, heads, heads, bias=True
        )
        self.o_proj = RowParallelLinear(
            context, self.qkv_proj.output_partition, config.hidden_size, bias=True
        )
        self.backend: AttentionBackend = PagedAttention(
            context.ops, attention_spec(config, number)
        )

    def forward(self, hidden_TD: Tensor, kv_cache: Tensor, context: ForwardContext) -> Tensor:
        """Attend over this layer's cache. Collective over the tensor group."""
        qkv = self.qkv_proj.forward(hidden_TD)
        heads = self.qkv_proj.num_heads
        heads_TNH = qkv.view(qkv.shape[0], -1, self.head_size)
        output_TNH = self.backend.forward(
            heads_TNH[:, :heads],
            heads_TNH[:, heads : 2 * heads],
            heads_TNH[:, 2 * heads :],
            kv_cache,
            context.attention,
        )
        return self.o_proj.forward(context.narrow(output_TNH.flatten(1)))


class GPT2MLP(nn.Module):
    """``down(act(up(x)))``."""

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.up_proj = ColumnParallelLinear(context, config.hidden_size, inner, bias=True)
        self.act = Activation(context, config.hidden_act)
        self.down_proj = RowParallelLinear(context, inner, config.hidden_size, bias=True)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """[T, D] to [T, D]. Collective over the tensor group."""
        return self.down_proj.forward(self.act.forward(self.up_proj.forward(hidden_TD)))


class GPT2Layer(nn.Module):
    """One decoder layer; the following norm adds the residual."""

    def __init__(self, config: PretrainedConfig, context: LayerContext, number: int) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(context, config.hidden_size, config.norm_epsilon)
        self.attention = GPT2Attention(config, context, number)
        self.mlp_norm = LayerNorm(context, config.hidden_size, config.norm_epsilon)
        self.mlp = GPT2MLP(config, context)

    def forward(
        self,
        hidden_TD: Tensor,
        residual_TD: Tensor | None,
        positions_T: Tensor,
        kv_cache: Tensor,
        context: ForwardContext,
    ) -> tuple[Tensor, Tensor]:
        """Returns the MLP's output and the residual, not added yet.

        ``positions_T`` is unused: `embed` has added the position embeddings.
        """
        normed, residual = self.attention_norm.forward(hidden_TD, residual_TD)
        attended = self.attention.forward(normed, kv_cache, context)
        normed, residual = self.mlp_norm.forward(attended, context.narrow(residual))
        return self.mlp.forward(normed), residual


class GPT2LMHeadModel(CausalLM):
    """GPT-2, one pipeline stage of it."""

    name_prefix = "transformer."
    adapter_modules = {**ATTENTION_ADAPTERS, **PLAIN_MLP_ADAPTERS}  # noqa: RUF012

    def make_embedding(self, vocabulary: tuple[int, int, int]) -> VocabParallelEmbedding:
        """The token embedding; makes the position embedding as well."""
        self.embed_positions = PositionEmbedding(
            self.context, self.config.max_position_embeddings, self.config.hidden_size
        )
        return super().make_embedding(vocabulary)

    def make_layer(self, number: int) -> nn.Module:
        """A decoder layer."""
        return GPT2Layer(self.config, self.context, number)

    def make_norm(self) -> LayerNorm:
        """The norm after the last layer."""
        return LayerNorm(self.context, self.config.hidden_size, self.config.norm_epsilon)

    def embed(
        self, token_ids_T: Tensor, positions_T: Tensor, vectors_TD: Tensor | None
    ) -> Tensor:
        """The sums of token and position embeddings [T, D]."""
        vectors_TD = super().embed(token_ids_T, positions_T, vectors_TD)
        return vectors_TD + self.embed_positions.forward(positions_T)

    def checkpoint_weights(self) -> dict[str, tuple[WeightTarget, ...]]:
        """Each weight of the whole model by its Hugging Face name, and its parameter here."""
        is_tied = self.config.tie_word_embeddings
        embedding = [WeightTarget("embed_tokens.weight")]
        if is_tied:
            # A last stage without the embedding holds a copy of it as its head.
            embedding.append(WeightTarget("lm_head.weight"))
        weights = {
            "wte.weight": tuple(embedding),
            "wpe.weight": (WeightTarget("embed_positions.weight"),),
            "ln_f.weight": (WeightTarget("norm.weight"),),
            "ln_f.bias": (WeightTarget("norm.bias"),),
        }
        if not is_tied:
            weights["lm_head.weight"] = (WeightTarget("lm_head.weight"),)
        for number in range(self.config.num_hidden_layers):
            for name, target, shard, is_transposed in _LAYER_WEIGHTS:
                place = f"layers.{number}.{target}"
                weights[f"h.{number}.{name}.weight"] = (
                    WeightTarget(f"{place}.weight", shard, is_transposed),
                )
                weights[f"h.{number}.{name}.bias"] = (WeightTarget(f"{place}.bias", shard),)
        return weights
