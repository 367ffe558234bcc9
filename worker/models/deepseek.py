"""DeepSeek V2 and V3: latent attention, and experts in all but the first layers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from trimaran.kernels.attention import AttentionMetadata, LatentHeads, LatentRows, Rotation
from trimaran.worker.attention.backend import ForwardContext, KVCacheSpec, attention_spec
from trimaran.worker.attention.paged import PagedAttention
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.layers.family_linear import HeadMatrices
from trimaran.worker.layers.linear import (
    ColumnParallelLinear,
    LayerContext,
    MergedColumnParallelLinear,
    ParallelLinear,
    RowParallelLinear,
)
from trimaran.worker.layers.methods import UnquantizedLinearMethod
from trimaran.worker.layers.norm import RMSNorm
from trimaran.worker.layers.rotary import RotaryEmbedding
from trimaran.worker.models.interfaces import ATTENTION_ADAPTERS, StageRange, WeightTarget
from trimaran.worker.models.mixtral import ExpertLayer, MixtralForCausalLM
from trimaran.worker.parallel.partition import even_partition
from trimaran.worker.parallel.tensor_parallel import Addend

# Shapes: T tokens of the step, D hidden size, N query heads of this rank, H dims of a query
# head, L dims of a latent vector, R rotated dims of a key.

_LATENT_NORM_EPSILON = 1e-6
"""Epsilon of the norms inside the attention; the layer norms have another epsilon."""

_PREDICTED_LAYER = (
    "embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight",
    "shared_head.norm.weight", "shared_head.head.weight",
)  # fmt: skip
"""Weights that only a layer for multi-token prediction has."""


class LatentAttention(nn.Module):
    """Attention whose keys and values come from one latent vector a token.

    The cache holds that vector, normalised, and one rotated key that all heads share. A head's
    key is ``key_up.T`` times the vector, so a score is the vector times ``key_up`` times the
    query. A head's value is ``value_up`` times the vector, and is computed after the weighted
    sum of vectors. The keys and values of heads are never computed: the queries of N heads
    attend to one key-value head of L + R dims.
    Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        context: LayerContext,
        rotary: RotaryEmbedding,
        number: int,
    ) -> None:
        super().__init__()
        heads, hidden = config.num_attention_heads, config.hidden_size
        rank = config.kv_lora_rank
        self._head_size, self._latent_size = config.head_size, rank
        self._query_rank = config.q_lora_rank
        parts = {"q": config.q_lora_rank} if config.q_lora_rank else {}
        parts["kv"] = rank + config.qk_rope_head_dim
        # Every rank needs the whole vectors.
        self.down_proj = MergedColumnParallelLinear(
            context.alone(), hidden, parts, bias=config.attn_bias
        )
        if config.q_lora_rank:
            self.q_norm = RMSNorm(context, config.q_lora_rank, _LATENT_NORM_EPSILON)
        mine = even_partition(heads, context.tp.rank, context.tp.size, alignment=1)
        self.q_proj = ColumnParallelLinear(
            context, config.q_lora_rank or hidden, mine.times(config.head_size)
        )
        self.kv_norm = RMSNorm(context, rank, _LATENT_NORM_EPSILON)
        keys, rows = config.qk_nope_head_dim, config.qk_nope_head_dim + config.v_head_dim
        self.key_up = HeadMatrices(context, mine, rows, range(keys), rank, is_transposed=True)
        self.value_up = HeadMatrices(context, mine, rows, range(keys, rows), rank)
        self.o_proj = RowParallelLinear(
            context, mine.times(config.v_head_dim), hidden, bias=config.attn_bias
        )
        self._ops = context.ops
        # All layers share this module, which the model owns.
        self._rotary = [rotary]
        self._joint_ED: Tensor | None = None
        self._joint_places: list[int] = []
        spec = replace(attention_spec(config, number), latent_size=rank)
        self.backend = PagedAttention(context.ops, spec)

    def forward(
        self,
        hidden_TD: Tensor,
        residual_TD: Tensor | None,
        positions_T: Tensor,
        kv_cache: Tensor,
        context: ForwardContext,
    ) -> Addend:
        """Attend over this layer's cache. Collective over the tensor group.

        Returns the output, or None if it is in the residual already. With an output, the
        residual is narrowed already, as the output is.
        """
        rotary, norm = self._rotary[0], self.kv_norm
        query_TNH, latent_TL, key_TR = self._project(hidden_TD)
        rows = LatentRows(query_TNH, latent_TL, key_TR, norm.weight, norm.eps)
        rotation = Rotation(rotary.cos_sin, positions_T, rotary.is_neox)
        heads = LatentHeads(self.key_up.weight, self.value_up.weight)
        output_TNV = self.backend.decode_latents(
            rows, rotation, kv_cache, context.attention, heads
        )
        if output_TNV is None:
            output_TNV = self._attend(rows, rotation, kv_cache, context.attention, heads)
        return self.o_proj.add_to(residual_TD, context.narrow(output_TNV.flatten(1)))

    @property
    def joinable(self) -> tuple[ParallelLinear, ...]:
        """The linear layers whose products can be parts of one: none if they are quantized or
        have biases, or if queries come from compressed vectors."""
        linears = self.q_proj, self.down_proj
        if self._query_rank or not all(each.bias is None for each in linears):
            return ()
        is_plain = all(isinstance(each.method, UnquantizedLinearMethod) for each in linears)
        return linears if is_plain else ()

    def join_products(self) -> None:
        """Let one product compute queries and latent vectors, whose weights become parts of one
        matrix, if they are `joinable`. Call after the weights are loaded."""
        weights = [linear.weight for linear in self.joinable]
        if not weights:
            return
        joint_ED = torch.cat([weight.data for weight in weights])
        parts = torch.split(joint_ED, [len(weight) for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part
        self._joint_ED, self._joint_places = joint_ED, self._places()

    def _joint(self) -> Tensor | None:
        """The matrix of `join_products`; None while another method multiplies, or after the
        weights were replaced."""
        if self._joint_ED is None or not self.joinable or self._places() != self._joint_places:
            return None
        return self._joint_ED

    def _places(self) -> list[int]:
        return [linear.weight.data_ptr() for linear in self.joinable]

    def _project(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, N, H], latent vectors [T, L] and rotated keys [T, R], none of them
        normalised or rotated."""
        query_rank, joint_ED = self._query_rank, self._joint()
        if joint_ED is not None:
            both = self._ops.linear(hidden_TD, joint_ED)
            sizes = [len(self.q_proj.weight), len(self.down_proj.weight)]
            query, vectors = torch.split(both, sizes, dim=1)
        else:
            vectors = self.down_proj.forward(hidden_TD)
            query_input = hidden_TD
            if query_rank:
                query_input, _ = self.q_norm.forward(vectors[:, :query_rank], None)
                vectors = vectors[:, query_rank:]
            query = self.q_proj.forward(query_input)
        query_TNH = query.view(query.shape[0], -1, self._head_size)
        return query_TNH, vectors[:, : self._latent_size], vectors[:, self._latent_size :]

    def _attend(
        self,
        rows: LatentRows,
        rotation: Rotation,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        heads: LatentHeads,
    ) -> Tensor:
        """Normalise, rotate, store and attend in turn. Returns [T, N, V]."""
        latent_TL, _ = self.kv_norm.forward(rows.latent, None)
        self._ops.rope_and_cache_latent(
            rows.query,
            latent_TL,
            rows.key,
            rotation.cos_sin,
            rotation.positions,
            kv_cache,
            metadata.slot_mapping,
            rotation.is_neox,
        )
        return self.backend.attend_to_latents(
            rows.query, (latent_TL, rows.key), kv_cache, metadata, heads
        )


class DeepseekLayer(ExpertLayer):
    """A decoder layer with latent attention."""

    def make_attention(
        self,
        config: PretrainedConfig,
        context: LayerContext,
        rotary: RotaryEmbedding,
        number: int,
    ) -> nn.Module:
        """The attention of a layer."""
        return LatentAttention(config, context, rotary, number)


class DeepseekV2ForCausalLM(MixtralForCausalLM):
    """DeepSeek V2, one pipeline stage of it."""

    layer_class = DeepseekLayer
    adapter_modules = {"attn_dense": ATTENTION_ADAPTERS["attn_dense"]}  # noqa: RUF012
    block = "mlp"
    shared_block = "shared_experts"
    projections = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}  # noqa: RUF012

    def make_shared(self) -> None:
        """Make the angles for the rotated dims of queries and keys."""
        config = self.config
        self.rotary = self.local_rotary = RotaryEmbedding(
            self.context,
            config.qk_rope_head_dim,
            config.max_position_embeddings,
            config.rotary_base,
            config.rope_scaling,
            is_neox=config.position_embedding_type != "rope_gptj",
        )

    def process_weights_after_loading(self) -> None:
        """Also join products of one input. A CPU's weights may be mapped from a file, and joint
        weights would be copies."""
        super().process_weights_after_loading()
        for module in self.modules():
            if isinstance(module, LatentAttention) and self.device.type != "cpu":
                module.join_products()

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One entry a layer of this stage, in order; every rank caches whole vectors."""
        spec = KVCacheSpec(
            num_kv_heads=1,
            head_size=self.config.kv_lora_rank + self.config.qk_rope_head_dim,
            dtype=self.context.dtype,
            is_latent=True,
        )
        return [spec] * (self.stage.end - self.stage.first)

    def checkpoint_weights(self) -> dict[str, tuple[WeightTarget, ...]]:
        """Each weight of the whole model by its Hugging Face name, and its parameter here."""
        weights = super().checkpoint_weights()
        for number in range(self.config.num_hidden_layers):
            layer = f"layers.{number}"
            weights[f"{layer}.self_attn.kv_b_proj.weight"] = tuple(
                WeightTarget(f"{layer}.attention.{name}.weight")
                for name in ("key_up", "value_up")
            )
        return weights

    def layer_weights(self) -> list[tuple[str, str, str]]:
        """(checkpoint name, parameter, shard) of one layer's weights except the MLP's."""
        linears = [
            ("kv_a_proj_with_mqa", "down_proj", "kv", self.config.attn_bias),
            ("o_proj", "o_proj", "", self.config.attn_bias),
        ]
        if self.config.q_lora_rank:
            linears.append(("q_a_proj", "down_proj", "q", self.config.attn_bias))
            linears.append(("q_b_proj", "q_proj", "", False))
        else:
            linears.append(("q_proj", "q_proj", "", False))
        weights = [(f"{name}.weight", f"{to}.weight", "") for name, to in self.layer_norms()]
        for name, target, shard, has_bias in linears:
            for kind in ("weight", "bias") if has_bias else ("weight",):
                weights.append(
                    (f"self_attn.{name}.{kind}", f"attention.{target}.{kind}", shard)
                )
        return weights

    def layer_norms(self) -> list[tuple[str, str]]:
        """(checkpoint name, module) of one layer's norms."""
        norms = [*super().layer_norms(), ("self_attn.kv_a_layernorm", "attention.kv_norm")]
        if self.config.q_lora_rank:
            norms.append(("self_attn.q_a_layernorm", "attention.q_norm"))
        return norms


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek V3, one pipeline stage of it.

    The layer for multi-token prediction, after the last layer, is not loaded.
    """

    def __init__(
        self, config: PretrainedConfig, stage: StageRange, context: LayerContext
    ) -> None:
        super().__init__(config, stage, context)
        last, behind = f"layers.{config.num_hidden_layers - 1}.", config.num_hidden_layers
        names = [name.removeprefix(last) for name in self.checkpoint_weights() if last in name]
        self.ignored_weights += tuple(
            f"layers.{behind}.{name}" for name in (*_PREDICTED_LAYER, *names)
        )
