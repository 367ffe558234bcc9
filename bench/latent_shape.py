"""The limits of a decoder with latent attention, and experts behind its first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimaran.bench.roofline import ModelShape, Work, product


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The sizes that a Hugging Face configuration tells of."""
    return LatentShape.of(config) if config.get("kv_lora_rank") else ModelShape.of(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape(ModelShape):
    """DeepSeek's sizes: ``head_size`` counts the rotated dims of a query too."""

    latent: int
    """Dims of a token's vector, without the rotated key."""

    rotated: int
    value_size: int
    query_rank: int
    """Dims that queries come from; 0 means the hidden size."""

    shared: int
    """Inner width of the expert of every token."""

    dense_layers: int
    dense_inner: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> LatentShape:
        """From a Hugging Face configuration."""
        rotated, dtype = config["qk_rope_head_dim"], config.get("dtype") or "bfloat16"
        inner = config["moe_intermediate_size"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            kv_heads=1,
            head_size=config["qk_nope_head_dim"] + rotated,
            inner=inner,
            vocab=config["vocab_size"],
            experts=config["n_routed_experts"],
            chosen=config["num_experts_per_tok"],
            is_tied=bool(config.get("tie_word_embeddings")),
            value_bytes=4.0 if dtype == "float32" else 2.0,
            latent=config["kv_lora_rank"],
            rotated=rotated,
            value_size=config["v_head_dim"],
            query_rank=config.get("q_lora_rank") or 0,
            shared=inner * (config.get("n_shared_experts") or 0),
            dense_layers=config["first_k_dense_replace"],
            dense_inner=config["intermediate_size"],
        )

    @property
    def vector(self) -> int:
        """Numbers that the cache holds of a token in a layer."""
        return self.latent + self.rotated

    @property
    def kv_width(self) -> int:
        """Half of what the cache holds, which is keys and values at once."""
        return self.vector // 2

    @property
    def mlp_width(self) -> int:
        """Inner values of one token, of its experts and of the shared one."""
        return self.chosen * self.inner + self.shared

    @property
    def expert_bytes(self) -> float:
        """The weights of all experts that ranks may share out."""
        mixed = self.layers - self.dense_layers
        return mixed * 3 * self.hidden * self.inner * self.experts * self.value_bytes

    @property
    def kv_token_bytes(self) -> float:
        """KV cache of one token over all layers, whole on every rank."""
        return self.layers * self.vector * self.value_bytes

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        attention = sum(inputs * outputs for inputs, outputs in self._products())
        attention += self.heads * self.latent * self._up_width()
        router = self.hidden * self.experts
        mixture = 3 * self.hidden * (self.inner * self.experts + self.shared) + router
        dense = self.dense_layers * 3 * self.hidden * self.dense_inner
        layers = self.layers * attention + (self.layers - self.dense_layers) * mixture + dense
        matrices = 1 if self.is_tied else 2
        return (layers + matrices * self.vocab * self.hidden) * self.value_bytes

    def _products(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the products of a layer's attention but for those of heads."""
        queries = [(self.hidden, self.query_width)]
        if self.query_rank:
            queries = [(self.hidden, self.query_rank), (self.query_rank, self.query_width)]
        output = self.heads * self.value_size, self.hidden
        return [*queries, (self.hidden, self.vector), output]

    def _up_width(self) -> int:
        """Key and value dims that a head has of the latent vector."""
        return self.head_size - self.rotated + self.value_size

    def _attention(self, tokens: float, read_tokens: float, pairs: float) -> Work:
        """Queries go down to the vectors, or vectors up to keys: whichever takes less."""
        ups = 2 * self.heads * self.latent * self._up_width()
        over_vectors = ups * tokens + 2 * self.heads * (self.vector + self.latent) * pairs
        made = self.head_size + self.value_size
        over_keys = ups * (read_tokens + tokens) + 2 * self.heads * made * pairs
        moved = self.vector * (read_tokens + tokens) + tokens * self.heads * made
        moved += self.heads * self.latent * self._up_width()
        return Work(moved * self.value_bytes, min(over_vectors, over_keys))

    def _mlp(self, tokens: float, inner: float, read: float, chosen: float) -> Work:
        """Gated MLPs ``inner`` wide, of which ``read`` are read and a token has ``chosen``."""
        width = chosen * inner
        moved = 3 * read * self.hidden * inner + 2 * tokens * (self.hidden + width)
        return Work(moved * self.value_bytes, 6 * tokens * self.hidden * width)

    def step_work(
        self, tokens: float, read_tokens: float, pairs: float, logits: float
    ) -> list[tuple[int, Work]]:
        """(how often, work) of each operator of one step over ``tokens`` new tokens."""
        value, mixed = self.value_bytes, self.layers - self.dense_layers
        read = self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)
        products = [product(tokens, *sizes, value, 1) for sizes in self._products()]
        return [
            *((self.layers, each) for each in products),
            (self.layers, self._attention(tokens, read_tokens, pairs)),
            (mixed, self._mlp(tokens, self.inner, read, self.chosen)),
            (mixed, self._mlp(tokens, self.shared, 1, 1)),
            (self.dense_layers, self._mlp(tokens, self.dense_inner, 1, 1)),
            (
                1,
                Work(
                    (self.hidden + logits) * self.vocab * value,
                    2 * logits * self.hidden * self.vocab,
                ),
            ),
        ]
