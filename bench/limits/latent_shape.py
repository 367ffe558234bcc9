"""The limits of a decoder with latent attention, and experts behind its first layers."""

from __future__ import annotations

from dataclasses import dataclass

from trimaran.bench.limits.roofline import ModelShape, Work, common_sizes
from trimaran.worker.config.pretrained_config import PretrainedConfig


def shape_of(config: PretrainedConfig) -> ModelShape:
    """The sizes of a model."""
    return LatentShape.of(config) if config.kv_lora_rank else ModelShape.of(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape(ModelShape):
    """DeepSeek's sizes: ``head_size`` counts the rotated dims of a query too."""

    latent: int
    """Dims of a token's vector, without the rotated key."""

    rotated: int
    value_size: int
    query_rank: int
    """Dims that queries come from; 0 means the hidden size."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> LatentShape:
        """The shape of a model with this configuration."""
        sizes = common_sizes(config)
        sizes["head_size"] = config.qk_nope_head_dim + config.qk_rope_head_dim
        return cls(
            kv_heads=1,
            latent=config.kv_lora_rank,
            rotated=config.qk_rope_head_dim,
            value_size=config.v_head_dim,
            query_rank=config.q_lora_rank,
            **sizes,
        )

    @property
    def vector(self) -> int:
        """Elements of the cache for one token in one layer."""
        return self.latent + self.rotated

    @property
    def kv_width(self) -> int:
        """Half of the cache, which is keys and values at once."""
        return self.vector // 2

    @property
    def kv_token_bytes(self) -> float:
        """KV cache of one token over all layers, whole on every rank."""
        return self.layers * self.vector * self.value_bytes

    def _products(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the products of a layer's attention, except products of single
        heads.
        """
        queries = [(self.hidden, self.query_width)]
        if self.query_rank:
            queries = [(self.hidden, self.query_rank), (self.query_rank, self.query_width)]
        output = self.heads * self.value_size, self.hidden
        return [*queries, (self.hidden, self.vector), output]

    def _attention_weights(self) -> int:
        products = sum(inputs * outputs for inputs, outputs in self._products())
        return products + self.heads * self.latent * self._up_width()

    def _up_width(self) -> int:
        """Key and value dims that a head derives from the latent vector."""
        return self.head_size - self.rotated + self.value_size

    def _attention(self, tokens: float, read_tokens: float, pairs: float) -> Work:
        """Queries projected to the latent dims, or vectors expanded to keys: the cheaper
        way.
        """
        ups = 2 * self.heads * self.latent * self._up_width()
        over_vectors = ups * tokens + 2 * self.heads * (self.vector + self.latent) * pairs
        made = self.head_size + self.value_size
        over_keys = ups * (read_tokens + tokens) + 2 * self.heads * made * pairs
        moved = self.vector * (read_tokens + tokens) + tokens * self.heads * made
        moved += self.heads * self.latent * self._up_width()
        return Work(moved * self.value_bytes, min(over_vectors, over_keys))
