"""The operators in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trimaran.kernels import byte_reference, integer_reference, reference
from trimaran.kernels.attention import (
    AttentionMetadata,
    AttentionSpec,
    HeadNorms,
    LatentHeads,
    LatentRows,
    Rotation,
)
from trimaran.kernels.cpu.decoder import Decoder, DecoderShape, LayerWeights
from trimaran.kernels.integer_reference import ReferenceIntegerProduct
from trimaran.kernels.integers import IntegerExperts, IntegerProduct, IntegerWeight
from trimaran.kernels.quantized import BlockMap, ByteInputs, ByteProduct, ByteRows, ByteWeight
from trimaran.kernels.routing import (
    ExpertCounter,
    ExpertForm,
    ExpertRouting,
    MixtureInput,
    MixtureWeights,
)


class TorchOps:
    """`Ops` by the functions of `reference`; `select_ops` has mypy check each signature."""

    is_deterministic = False

    linear = staticmethod(reference.linear)
    head_linear = staticmethod(reference.head_linear)
    gated_linear = staticmethod(reference.gated_linear)
    logits = staticmethod(reference.logits)
    add_linear = staticmethod(reference.add_linear)
    linear_parts = staticmethod(reference.linear_parts)
    rms_norm = staticmethod(reference.rms_norm)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    norm_heads = staticmethod(reference.norm_heads)
    layer_norm = staticmethod(reference.layer_norm)
    add_layer_norm = staticmethod(reference.add_layer_norm)
    silu_and_mul = staticmethod(reference.silu_and_mul)
    gelu_and_mul = staticmethod(reference.gelu_and_mul)
    activation = staticmethod(reference.activation)
    router_logits = staticmethod(reference.router_logits)
    choose_experts = staticmethod(reference.choose_experts)
    embed = staticmethod(reference.embed)
    rope_and_cache = staticmethod(reference.rope_and_cache)
    rope_and_cache_latent = staticmethod(reference.rope_and_cache_latent)
    write_kv = staticmethod(reference.write_kv)
    paged_attention = staticmethod(reference.paged_attention)
    fp8_expert_mlp = staticmethod(byte_reference.expert_mlp)
    integer_expert_mlp = staticmethod(integer_reference.expert_mlp)

    def fp8_product(self, weight: ByteWeight, inputs: ByteInputs) -> ByteProduct:
        return byte_reference.ReferenceProduct(weight, inputs)

    def fp8_expert_storage(self, values: Tensor, blocks: BlockMap | None) -> Tensor:
        return values

    def int8_product(self, weight: ByteWeight, inputs: ByteInputs) -> ByteProduct | None:
        return None

    def integer_expert_storage(
        self, weights: Sequence[IntegerWeight], *, is_gated: bool
    ) -> IntegerExperts:
        return integer_reference.expert_storage(weights)

    def integer_product(
        self, weight: IntegerWeight, *, has_byte_inputs: bool = False, is_gated: bool = False
    ) -> IntegerProduct:
        return ReferenceIntegerProduct(weight, has_byte_inputs=has_byte_inputs)

    def expert_mlp(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Tensor,
        down: Tensor,
        first_expert: int = 0,
        form: ExpertForm | None = None,
    ) -> Tensor:
        return reference.expert_mlp(x, weights, ids, gate_up, down, first_expert, form)

    def mixture_parts(
        self,
        rows: MixtureInput,
        weights: MixtureWeights,
        routing: ExpertRouting,
        counter: ExpertCounter | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """None: torch normalises, chooses and multiplies in several operators."""
        return None

    def latent_attention(
        self,
        query: Tensor,
        latent: Tensor,
        key: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        heads: LatentHeads,
    ) -> Tensor:
        parts = self.head_linear, self.paged_attention
        return reference.latent_attention(
            query, latent, key, kv_cache, metadata, spec, heads, parts
        )

    def decoded_latents(
        self,
        rows: LatentRows,
        rotation: Rotation,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        heads: LatentHeads,
    ) -> Tensor | None:
        """None: torch normalises, rotates and attends in several operators."""
        return None

    def rotated_attention(
        self,
        heads: Tensor,
        cos_sin: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        is_neox: bool = True,
        norms: HeadNorms | None = None,
    ) -> Tensor | None:
        """None: torch rotates and attends in two operators."""
        return None

    def quantized_attention(
        self,
        heads: Tensor,
        cos_sin: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        inputs: ByteInputs,
        is_neox: bool = True,
        norms: HeadNorms | None = None,
    ) -> ByteRows | None:
        """None: torch attends and quantizes in two operators."""
        return None

    def fuse_decoder(
        self, shape: DecoderShape, layers: Sequence[LayerWeights]
    ) -> Decoder | None:
        """None: torch runs layers operator by operator."""
        return None

    @property
    def backends(self) -> dict[str, str]:
        return dict.fromkeys(reference.OPERATORS, "torch")
