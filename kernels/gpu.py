"""The operators on a GPU: Triton kernels, and torch where torch is as fast."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trimaran.kernels import paged_attention, reference
from trimaran.kernels.attention import (
    AttentionMetadata,
    AttentionSpec,
    HeadNorms,
    LatentHeads,
    LatentRows,
    Rotation,
)
from trimaran.kernels.byte_products import check_served, make_product
from trimaran.kernels.decode_attention import DecodeAttention, TritonDecodes
from trimaran.kernels.experts.floats import FixedExperts, Mixture
from trimaran.kernels.experts.fp8 import Fp8Mixture
from trimaran.kernels.experts.integers import IntegerMixture
from trimaran.kernels.integer_products import IntegerProducts
from trimaran.kernels.integers import IntegerExperts, IntegerProduct, IntegerWeight
from trimaran.kernels.products import Products, TorchProducts
from trimaran.kernels.prompt_attention import PromptAttention, TritonPrompts
from trimaran.kernels.quantized import (
    BlockMap,
    ByteInputs,
    ByteProduct,
    ByteRows,
    ByteWeight,
    Fp8Experts,
)
from trimaran.kernels.routing import (
    ExpertCounter,
    ExpertForm,
    ExpertRouting,
    MixtureInput,
    MixtureWeights,
)
from trimaran.kernels.torch_ops import TorchOps
from trimaran.kernels.triton import elementwise as triton_elementwise
from trimaran.kernels.triton import heads as triton_heads
from trimaran.kernels.triton import norm as triton_norm
from trimaran.kernels.triton import rotary as triton_rotary
from trimaran.kernels.triton import routing as triton_routing
from trimaran.kernels.triton.attention import latent_cache as triton_latent_cache
from trimaran.kernels.triton.attention import latent_prompts as triton_latent_prompts
from trimaran.kernels.triton.attention.latent_query import query_latents
from trimaran.kernels.triton.few_tokens.mixture import normed_logits, stream_mixture

_TRITON = (
    "rms_norm", "add_rms_norm", "norm_heads", "layer_norm", "add_layer_norm", "silu_and_mul",
    "gelu_and_mul", "activation", "embed", "rope_and_cache",
    "rope_and_cache_latent", "write_kv", "head_linear", "paged_attention",
    "latent_attention",
    "choose_experts", "expert_mlp",
)  # fmt: skip
_PRODUCTS = ("linear", "add_linear", "gated_linear", "logits", "router_logits")


class TritonOps(TorchOps):
    """`Ops` on a GPU; methods without a docstring do exactly what `Ops` declares.

    Triton runs the operators on each token, ``products`` the matrix products, ``prompts`` and
    ``decodes`` the attention of prefill and decode rows, ``experts`` the expert MLPs,
    ``integers`` the products by integer weights. With ``is_deterministic``, a token's result is
    independent of the other tokens in the batch.
    """

    silu_and_mul = staticmethod(triton_elementwise.silu_and_mul)
    gelu_and_mul = staticmethod(triton_elementwise.gated_activation)
    activation = staticmethod(triton_elementwise.activation)
    embed = staticmethod(triton_elementwise.embed)
    choose_experts = staticmethod(triton_routing.choose_experts)
    rope_and_cache = staticmethod(triton_rotary.rope_and_cache)
    rope_and_cache_latent = staticmethod(triton_latent_cache.rope_and_cache_latent)
    write_kv = staticmethod(triton_rotary.write_kv)
    norm_heads = staticmethod(triton_norm.norm_heads)

    def __init__(
        self,
        is_deterministic: bool = False,
        products: Products | None = None,
        prompts: PromptAttention | None = None,
        decodes: DecodeAttention | None = None,
        experts: Mixture | None = None,
        integers: IntegerProducts | None = None,
    ) -> None:
        self.is_deterministic = is_deterministic
        self._products = products or TorchProducts()
        self._prompts = prompts or TritonPrompts()
        self._decodes = decodes or TritonDecodes()
        self._experts = experts or FixedExperts()
        self._integers = integers or IntegerProducts(is_fixed=is_deterministic)
        self._integer_experts = IntegerMixture(self._integers.dtype, is_deterministic)
        self._fp8_experts = Fp8Mixture(self._integers.dtype, is_deterministic)

    @property
    def backends(self) -> dict[str, str]:
        names = dict.fromkeys(reference.OPERATORS, "torch")
        names.update(dict.fromkeys(_TRITON, "triton"))
        names.update(dict.fromkeys(_PRODUCTS, self._products.backend))
        names["expert_mlp"] = self._experts.backend
        others = ("cuda, " if "cuda" in self._products.backend else "") + "triton, torch"
        names["fp8_product"] = "triton" if self.is_deterministic else others
        names["integer_product"] = self._integers.backend
        names["fp8_expert_mlp"] = self._fp8_experts.backend
        names["integer_expert_mlp"] = self._integer_experts.backend
        attention = {self._decodes.backend, self._prompts.backend, "triton"}
        names["paged_attention"] = ", ".join(sorted(attention))
        return names

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._products.linear(x, weight, bias)

    def fp8_product(self, weight: ByteWeight, inputs: ByteInputs) -> ByteProduct:
        return make_product(weight, inputs, is_fixed=self.is_deterministic)

    def int8_product(self, weight: ByteWeight, inputs: ByteInputs) -> ByteProduct | None:
        return make_product(weight, inputs, is_fixed=self.is_deterministic)

    def integer_product(
        self, weight: IntegerWeight, *, has_byte_inputs: bool = False, is_gated: bool = False
    ) -> IntegerProduct:
        return self._integers.make(weight, has_byte_inputs=has_byte_inputs, is_gated=is_gated)

    def fp8_expert_storage(self, values: Tensor, blocks: BlockMap | None) -> Tensor:
        check_served(values, blocks)
        self._fp8_experts.compile(len(values), has_blocks=blocks is not None)
        return values

    def fp8_expert_mlp(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Fp8Experts,
        down: Fp8Experts,
        first_expert: int = 0,
    ) -> Tensor:
        return self._fp8_experts.expert_mlp(x, weights, ids, gate_up, down, first_expert)

    def integer_expert_storage(
        self, weights: Sequence[IntegerWeight], *, is_gated: bool
    ) -> IntegerExperts:
        return self._integer_experts.storage(weights, is_gated=is_gated)

    def integer_expert_mlp(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: IntegerExperts,
        down: IntegerExperts,
        first_expert: int = 0,
        form: ExpertForm | None = None,
    ) -> Tensor:
        return self._integer_experts.expert_mlp(
            x, weights, ids, gate_up, down, first_expert, form
        )

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return triton_heads.head_linear(x, weight, is_fixed=self.is_deterministic)

    def add_linear(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor | None:
        return self._products.add_linear(x, weight, residual)

    def linear_parts(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._products.linear_parts(x, weight)

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._products.gated_linear(x, weight)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product in the dtype of ``x``: the sampler reads each logit once."""
        return self.linear(x, weight)

    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._products.router_logits(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return triton_norm.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return triton_norm.rms_norm(x, weight, eps, residual)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Sums are float32."""
        return triton_norm.layer_norm(x, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        return triton_norm.layer_norm(x, weight, bias, eps, residual)

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
        return self._experts.expert_mlp(x, weights, ids, gate_up, down, first_expert, form)

    def mixture_parts(
        self,
        rows: MixtureInput,
        weights: MixtureWeights,
        routing: ExpertRouting,
        counter: ExpertCounter | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Three kernels, for few tokens."""
        if not self._experts.streams(len(rows.residual), routing, weights):
            return None
        normed, logits, residual = normed_logits(rows, weights.router)
        return stream_mixture(normed, logits, routing, weights, counter), residual

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
        """One kernel, for a step of decode rows alone."""
        if not is_neox or not _has_lone_decodes(metadata):
            return None
        return self._decodes.rotated(
            heads, cos_sin, kv_cache, metadata, spec, norms, is_fixed=self.is_deterministic
        )

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
        """One kernel, for a step of decode rows alone and heads of a group's size."""
        if not is_neox or not _has_lone_decodes(metadata) or self.is_deterministic:
            return None
        return self._decodes.quantized(heads, cos_sin, kv_cache, metadata, spec, inputs, norms)

    def paged_attention(
        self, query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        return paged_attention.paged_attention(
            query, kv_cache, metadata, spec, is_deterministic=self.is_deterministic,
            decodes=self._decodes,
            prompts=self._prompts,
        )  # fmt: skip

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
        """Decode rows attend to latent vectors, prefill rows to keys and values expanded from
        the latent vectors of their own tokens."""
        has_prompts = metadata.num_decodes < metadata.seq_lens.shape[0]
        if self.is_deterministic or spec.window or not has_prompts:
            return super().latent_attention(query, latent, key, kv_cache, metadata, spec, heads)
        return triton_latent_prompts.attend_step(
            query, latent, key, kv_cache, metadata, spec, heads
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
        """Four kernels, for a step of decode rows alone."""
        if self.is_deterministic or metadata.num_decodes < metadata.seq_lens.shape[0]:
            return None
        slots = metadata.slot_mapping
        query = query_latents(rows, rotation, kv_cache, slots, heads.key_up)
        attended = self.paged_attention(query, kv_cache, metadata, spec)
        return self.head_linear(attended, heads.value_up)


def _has_lone_decodes(metadata: AttentionMetadata) -> bool:
    """Whether each row is a sequence's only one. The kernel that rotates stores a row's keys
    while it attends in other rows."""
    return metadata.num_decodes == metadata.seq_lens.shape[0] and not metadata.shares_rows
