"""The operators on a GPU: our Triton kernels, and torch where it is as good."""

from __future__ import annotations

from torch import Tensor

from trimaran.kernels import paged_attention, reference
from trimaran.kernels.attention import AttentionMetadata, AttentionSpec, LatentHeads
from trimaran.kernels.decode_attention import DecodeAttention, TritonDecodes
from trimaran.kernels.experts import FixedExperts, Mixture
from trimaran.kernels.products import Products, TorchProducts
from trimaran.kernels.prompt_attention import PromptAttention, TritonPrompts
from trimaran.kernels.torch_ops import TorchOps
from trimaran.kernels.triton import elementwise as triton_elementwise
from trimaran.kernels.triton import heads as triton_heads
from trimaran.kernels.triton import norm as triton_norm
from trimaran.kernels.triton import rotary as triton_rotary
from trimaran.kernels.triton import routing as triton_routing
from trimaran.kernels.triton.attention import latent_cache as triton_latent_cache
from trimaran.kernels.triton.attention import latent_prompts as triton_latent_prompts

_TRITON = (
    "rms_norm", "add_rms_norm", "norm_heads", "layer_norm", "add_layer_norm", "silu_and_mul",
    "gelu_and_mul", "activation", "embed", "rope_and_cache",
    "rope_and_cache_latent", "write_kv", "head_linear", "paged_attention",
    "latent_attention",
    "choose_experts", "expert_mlp",
)  # fmt: skip
_PRODUCTS = ("linear", "add_linear", "gated_linear", "logits", "router_logits")


class TritonOps(TorchOps):
    """What is done to each token by Triton, products by ``products``, the attention of
    prompts by ``prompts`` and that of decodes by ``decodes``, mixtures by ``experts``.

    With ``is_deterministic`` a token's result does not depend on the tokens beside it.
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
    ) -> None:
        self.is_deterministic = is_deterministic
        self._products = products or TorchProducts()
        self._prompts = prompts or TritonPrompts()
        self._decodes = decodes or TritonDecodes()
        self._experts = experts or FixedExperts()

    @property
    def backends(self) -> dict[str, str]:
        """Which operators are Triton's."""
        names = dict.fromkeys(reference.OPERATORS, "torch")
        names.update(dict.fromkeys(_TRITON, "triton"))
        names.update(dict.fromkeys(_PRODUCTS, self._products.backend))
        names["expert_mlp"] = self._experts.backend
        attention = {self._decodes.backend, self._prompts.backend, "triton"}
        names["paged_attention"] = ", ".join(sorted(attention))
        return names

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias`` in the dtype of ``x``."""
        return self._products.linear(x, weight, bias)

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Each head's first dims times its own matrix; see `reference.head_linear`."""
        return triton_heads.head_linear(x, weight, is_fixed=self.is_deterministic)

    def add_linear(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor | None:
        """Add the product into ``residual``, or return it; see `reference.add_linear`."""
        return self._products.add_linear(x, weight, residual)

    def linear_parts(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product, maybe in float32 parts; see `reference.linear_parts`."""
        return self._products.linear_parts(x, weight)

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """``silu(x @ gate.T) * (x @ up.T)``, with gate rows above up rows."""
        return self._products.gated_linear(x, weight)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x @ weight.T`` in the dtype of ``x``, which the sampler reads once."""
        return self.linear(x, weight)

    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x @ weight.T`` as float32, never rounded to the weights' dtype."""
        return self._products.router_logits(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square normalisation in float32."""
        return triton_norm.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add ``x`` into ``residual``, which becomes the sum, and normalise it."""
        return triton_norm.rms_norm(x, weight, eps, residual)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Layer normalisation in float32."""
        return triton_norm.layer_norm(x, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        """Add ``x`` into ``residual``, which becomes the sum, and normalise it."""
        return triton_norm.layer_norm(x, weight, bias, eps, residual)

    def expert_mlp(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Tensor,
        down: Tensor,
        first_expert: int = 0,
    ) -> Tensor:
        """The weighted sum of each token's experts; see `reference.expert_mlp`."""
        return self._experts.expert_mlp(x, weights, ids, gate_up, down, first_expert)

    def rotated_attention(
        self,
        heads: Tensor,
        cos_sin: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        is_neox: bool = True,
    ) -> Tensor | None:
        """Rotation and attention in one kernel, for a step of decodes alone."""
        if not is_neox or metadata.num_decodes < metadata.seq_lens.shape[0]:
            return None
        return self._decodes.rotated(
            heads, cos_sin, kv_cache, metadata, spec, is_fixed=self.is_deterministic
        )

    def paged_attention(
        self, query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Causal attention of each sequence's last tokens; see `reference.paged_attention`."""
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
        """Decodes attend to latent vectors as they are, prompts to keys and values that are
        made of their own vectors; see `reference.latent_attention`."""
        has_prompts = metadata.num_decodes < metadata.seq_lens.shape[0]
        if self.is_deterministic or spec.window or not has_prompts:
            return super().latent_attention(query, latent, key, kv_cache, metadata, spec, heads)
        return triton_latent_prompts.attend_step(
            query, latent, key, kv_cache, metadata, spec, heads
        )
