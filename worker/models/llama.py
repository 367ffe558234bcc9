"""Llama and Mistral: rotary positions, grouped queries, RMS norm, gated MLP."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from trimaran.kernels.attention import HeadNorms
from trimaran.kernels.quantized import ByteRows
from trimaran.worker.attention.backend import (
    AttentionBackend,
    ForwardContext,
    attention_spec,
)
from trimaran.worker.attention.paged import PagedAttention
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.layers.activation import GatedActivation
from trimaran.worker.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from trimaran.worker.layers.linear import (
    LayerContext,
    MergedColumnParallelLinear,
    ParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from trimaran.worker.layers.norm import RMSNorm
from trimaran.worker.layers.rotary import RotaryEmbedding
from trimaran.worker.models.interfaces import (
    ATTENTION_ADAPTERS,
    AdapterModules,
    CausalLM,
    FirstProjection,
    WeightTarget,
)
from trimaran.worker.parallel.tensor_parallel import Addend

# Shapes: T tokens of the step, D hidden size, N query heads, A all heads of a token's
# product, H head size.

_HEAD_NORMS = [
    ("self_attn.q_norm", "attention.q_norm"),
    ("self_attn.k_norm", "attention.k_norm"),
]


class LlamaAttention(nn.Module):
    """Self-attention with rotary positions."""

    def __init__(
        self,
        config: PretrainedConfig,
        context: LayerContext,
        rotary: RotaryEmbedding,
        number: int,
    ) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.qkv_proj = QKVParallelLinear(
            context,
            config.hidden_size,
            config.head_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attn_bias or config.qkv_bias,
        )
        self.o_proj = RowParallelLinear(
            context, self.qkv_proj.output_partition, config.hidden_size, bias=config.attn_bias
        )
        self.has_head_norms = config.qk_norm
        if config.qk_norm:
            sizes = config.head_size, config.norm_epsilon, config.norm_offset
            self.q_norm = RMSNorm(context, *sizes)
            self.k_norm = RMSNorm(context, *sizes)
        self._ops = context.ops
        # All layers share this module, which the model owns.
        self._rotary = [rotary]
        self.backend: AttentionBackend = PagedAttention(
            context.ops, attention_spec(config, number)
        )

    def forward(
        self,
        hidden_TD: Tensor | ByteRows,
        residual_TD: Tensor | None,
        positions_T: Tensor,
        kv_cache: Tensor,
        context: ForwardContext,
    ) -> Addend:
        """Attend over this layer's cache. Collective over the tensor group.

        Returns the output, or None if it is in the residual already. With an output, the
        residual is narrowed already, as the output is.
        """
        attention = context.narrow_attention if self.qkv_proj.is_separable else None
        is_narrow = attention is not None
        if attention is None:
            attention = context.attention
        else:
            # The rotation reads positions early, so a kernel that starts after all earlier ones
            # have ended must run between the product and the kernels before it.
            assert isinstance(hidden_TD, Tensor), "a separable product takes floats"
            narrow_positions = context.narrow(positions_T)
            self._store(hidden_TD, positions_T, kv_cache, context)
            hidden_TD, positions_T = context.narrow(hidden_TD), narrow_positions
        product_TE = context.known_product
        if product_TE is None:
            product_TE = self.qkv_proj.forward(hidden_TD)
        heads_TAH = self._heads(product_TE)
        if context.keeps_all:
            grouped = self._attend_in_groups(heads_TAH, residual_TD, kv_cache, context)
            if grouped is not None:
                return self.o_proj.add_to(residual_TD, grouped)
        output = self.backend.rotate_and_attend(
            heads_TAH, self._rotary[0], positions_T, kv_cache, attention, self._norms
        ).flatten(1)
        return self.o_proj.add_to(residual_TD, output if is_narrow else context.narrow(output))

    def _attend_in_groups(
        self,
        heads_TAH: Tensor,
        residual_TD: Tensor | None,
        kv_cache: Tensor,
        context: ForwardContext,
    ) -> ByteRows | None:
        """The output product's inputs from the kernel of attention; None, without effect, if
        they take a kernel of their own."""
        inputs = self.o_proj.grouped_inputs(residual_TD)
        if inputs is None:
            return None
        return self.backend.rotate_and_quantize(
            heads_TAH, self._rotary[0], kv_cache, context.attention, inputs, self._norms
        )

    def _store(
        self,
        hidden_TD: Tensor,
        positions_T: Tensor,
        kv_cache: Tensor,
        context: ForwardContext,
    ) -> None:
        """Write the keys and values of all tokens to their slots, without computing queries."""
        heads_TAH = self._heads(self.qkv_proj.keys_and_values(hidden_TD))
        slots_T = context.attention.slot_mapping
        scales_4K = self.backend.spec.kv_scales
        rotary = self._rotary[0]
        rotary.forward(heads_TAH, positions_T, kv_cache, slots_T, scales_4K, self._norms)

    def _heads(self, product: Tensor) -> Tensor:
        """The heads of a product [T, A * H]."""
        return product.view(product.shape[0], -1, self.head_size)

    @property
    def _norms(self) -> HeadNorms | None:
        """The norms of heads, if any."""
        if not self.has_head_norms:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class LlamaMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            context, config.hidden_size, {"gate": inner, "up": inner}, bias=config.mlp_bias
        )
        self.act = GatedActivation(context, config.hidden_act)
        self.down_proj = RowParallelLinear(
            context, inner, config.hidden_size, bias=config.mlp_bias
        )

    def forward(self, hidden_TD: Tensor | ByteRows, residual_TD: Tensor | None) -> Addend:
        """[T, D] to [T, D], added to the residual or returned. Collective over the group."""
        inner_TF = self.act.project_to(self.down_proj, self.gate_up_proj, hidden_TD)
        return self.down_proj.add_to(residual_TD, inner_TF)


def first_linear(module: nn.Module) -> ParallelLinear | None:
    """The linear layer that alone reads a module's input; None for other modules."""
    if isinstance(module, LlamaAttention):
        return module.qkv_proj
    return module.gate_up_proj if isinstance(module, LlamaMLP) else None


class LlamaLayer(nn.Module):
    """One decoder layer; the following norm adds the residual."""

    def __init__(
        self,
        config: PretrainedConfig,
        context: LayerContext,
        rotary: RotaryEmbedding,
        number: int,
    ) -> None:
        super().__init__()
        sizes = config.hidden_size, config.norm_epsilon, config.norm_offset
        self.attention_norm = RMSNorm(context, *sizes)
        self.attention = self.make_attention(config, context, rotary, number)
        self.mlp_norm = RMSNorm(context, *sizes)
        self.mlp = self.make_mlp(config, context, number)

    def make_attention(
        self,
        config: PretrainedConfig,
        context: LayerContext,
        rotary: RotaryEmbedding,
        number: int,
    ) -> nn.Module:
        """The attention of a layer."""
        return LlamaAttention(config, context, rotary, number)

    def make_mlp(
        self, config: PretrainedConfig, context: LayerContext, number: int
    ) -> nn.Module:
        """The MLP of a layer."""
        return LlamaMLP(config, context)

    def forward(
        self,
        hidden_TD: Addend,
        residual_TD: Tensor | None,
        positions_T: Tensor,
        kv_cache: Tensor,
        context: ForwardContext,
    ) -> tuple[Addend, Tensor]:
        """Returns the output, or None if it is in the residual, and the residual."""
        normed, residual = self.normalise(hidden_TD, residual_TD, context)
        residual = context.narrow(residual)
        attended = self.attention.forward(normed, residual, positions_T, kv_cache, context)
        return self.mix(attended, residual)

    def mix(self, attended: Addend, residual: Tensor) -> tuple[Addend, Tensor]:
        """The MLP of the norm of the sum of both, not added yet, and the sum."""
        normed, residual = self.mlp_norm.forward_to(first_linear(self.mlp), attended, residual)
        return self.mlp.forward(normed, residual), residual

    def normalise(
        self, hidden_TD: Addend, residual_TD: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor | ByteRows, Tensor]:
        """The attention's input, and the residual. If the attention's product is known, both
        are the same tensor, because the attention needs no input."""
        if context.known_product is None:
            linear = first_linear(self.attention)
            return self.attention_norm.forward_to(linear, hidden_TD, residual_TD)
        assert isinstance(hidden_TD, Tensor), "only the first layer's product is known"
        return hidden_TD, hidden_TD


class LlamaForCausalLM(CausalLM):
    """Llama, one pipeline stage of it; the base of families with the same structure."""

    layer_class: ClassVar[type[LlamaLayer]] = LlamaLayer
    layer_linears: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("self_attn.q_proj", "attention.qkv_proj", "q"),
        ("self_attn.k_proj", "attention.qkv_proj", "k"),
        ("self_attn.v_proj", "attention.qkv_proj", "v"),
        ("self_attn.o_proj", "attention.o_proj", ""),
        ("mlp.gate_proj", "mlp.gate_up_proj", "gate"),
        ("mlp.up_proj", "mlp.gate_up_proj", "up"),
        ("mlp.down_proj", "mlp.down_proj", ""),
    )
    """(checkpoint name, module, shard) of one layer's products."""

    name_prefix = "model."
    adapter_modules: ClassVar[AdapterModules] = {
        **ATTENTION_ADAPTERS,
        # Names of TensorRT-LLM's converter: the gate projection is h_to_4h.
        "mlp_h_to_4h": ("mlp.gate_up_proj", "gate"),
        "mlp_gate": ("mlp.gate_up_proj", "up"),
        "mlp_4h_to_h": ("mlp.down_proj", ""),
    }

    def make_shared(self) -> None:
        """Make the angles of rotary positions: one set, or a second set for layers with a
        window."""
        config = self.config
        sizes = config.rotary_size or config.head_size, config.max_position_embeddings
        self.rotary = RotaryEmbedding(
            self.context, *sizes, config.rotary_base, config.rope_scaling
        )
        self.local_rotary = self.rotary
        if config.local_rotary_base:
            self.local_rotary = RotaryEmbedding(
                self.context,
                *sizes,
                config.local_rotary_base,
                None,
                switch_at=self.rotary.switch_at,
            )

    def make_layer(self, number: int) -> nn.Module:
        """A decoder layer of this family."""
        return self.layer_class(self.config, self.context, self.rotary_of(number), number)

    def make_norm(self) -> RMSNorm:
        """The norm behind the last layer."""
        config = self.config
        return RMSNorm(
            self.context, config.hidden_size, config.norm_epsilon, config.norm_offset
        )

    def make_head(
        self, vocabulary: tuple[int, int, int], tied_to: VocabParallelEmbedding | None
    ) -> ParallelLMHead:
        """The output matrix, whose logits may be capped."""
        return ParallelLMHead(
            self.context, *vocabulary, tied_to=tied_to, soft_cap=self.config.final_soft_cap
        )

    def first_projection(self) -> FirstProjection | None:
        """The first layer's query, key and value product, if its attention computes all at
        once."""
        attention = self.layers["0"].attention if self.stage.is_first else None
        return self._project_first if isinstance(attention, LlamaAttention) else None

    def _project_first(self, token_ids_T: Tensor) -> Tensor:
        layer: Any = self.layers["0"]
        normed_TD, _ = layer.attention_norm.forward(
            self.embed_tokens.forward(token_ids_T), None
        )
        product_TE: Tensor = layer.attention.qkv_proj.forward(normed_TD)
        return product_TE

    def rotary_of(self, number: int) -> RotaryEmbedding:
        """The angles of a layer."""
        return self.local_rotary if self.config.window_of(number) else self.rotary

    def checkpoint_weights(self) -> dict[str, tuple[WeightTarget, ...]]:
        """Each weight of the whole model by its Hugging Face name, and its parameter here."""
        config = self.config
        is_tied = config.tie_word_embeddings
        embedding = [WeightTarget("embed_tokens.weight")]
        if is_tied:
            # A last stage without the embedding holds a copy of it as its head.
            embedding.append(WeightTarget("lm_head.weight"))
        weights = {
            "embed_tokens.weight": tuple(embedding),
            "norm.weight": (WeightTarget("norm.weight"),),
        }
        if not is_tied:
            weights["lm_head.weight"] = (WeightTarget("lm_head.weight"),)
        for number in range(config.num_hidden_layers):
            for name, target, shard in self.layer_weights():
                weights[f"layers.{number}.{name}"] = (
                    WeightTarget(f"layers.{number}.{target}", shard),
                )
        return weights

    def layer_weights(self) -> list[tuple[str, str, str]]:
        """(checkpoint name, parameter, shard) of one layer's weights."""
        weights = [(f"{name}.weight", f"{to}.weight", "") for name, to in self.layer_norms()]
        for name, target, shard in self.layer_linears:
            weights.append((f"{name}.weight", f"{target}.weight", shard))
            if self._has_bias(target):
                weights.append((f"{name}.bias", f"{target}.bias", shard))
        return weights

    def layer_norms(self) -> list[tuple[str, str]]:
        """(checkpoint name, module) of one layer's norms."""
        norms = [
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "mlp_norm"),
        ]
        return norms + (_HEAD_NORMS if self.config.qk_norm else [])

    def _has_bias(self, target: str) -> bool:
        if target.startswith("mlp"):
            return self.config.mlp_bias
        is_qkv = target == "attention.qkv_proj"
        return self.config.attn_bias or (is_qkv and self.config.qkv_bias)


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral, one pipeline stage of it; the differences are in its configuration."""


class Mistral3ForConditionalGeneration(MistralForCausalLM):
    """The decoder of a Mistral 3 with images; weights of the image encoder are not read."""

    outer_prefix = "language_model."
