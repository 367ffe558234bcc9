"""What attention needs of one step, and the interface that every attention backend serves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.layers.rotary import RotaryEmbedding

# Shapes: T tokens of the step, N query heads, K key-value heads, H head size, B tokens of a
# block.

__all__ = [
    "AttentionBackend", "AttentionMetadata", "AttentionSpec", "ForwardContext", "KVCacheSpec",
    "attention_spec",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """A layer's cache entry for one token. Layers with equal specs share a pool of blocks."""

    num_kv_heads: int
    """Heads on this rank."""

    head_size: int
    dtype: torch.dtype
    window: int = 0
    """Tokens a query looks back at, itself included; 0 means all."""

    is_latent: bool = False
    """A token has one vector a head, from which its key and its value come; not two."""

    def block_shape(self, block_size: int) -> tuple[int, int, int, int]:
        """A layer's block: keys and values (or latent vectors), tokens, heads, dims."""
        num_kinds = 1 if self.is_latent else 2
        return num_kinds, block_size, self.num_kv_heads, self.head_size

    @property
    def token_bytes(self) -> int:
        """Bytes a token takes in one layer."""
        return math.prod(self.block_shape(1)) * self.dtype.itemsize


@dataclass(slots=True, kw_only=True)
class ForwardContext:
    """What a layer may read of the step beside its input."""

    attention: AttentionMetadata

    kv_caches: Sequence[Tensor]
    """One tensor a layer of this rank's stage, [num_blocks, 2, B, K, H], or of latent vectors
    [num_blocks, 1, B, 1, H]: a view of the pool of all layers, with the pool's strides."""

    wanted: Tensor | None = None
    """int64, in the last stage: the tokens of which hidden states are wanted; None for all."""

    wanted_attention: AttentionMetadata | None = None
    """The tokens of ``wanted`` as decodes, each the last one of its sequence, where the last
    layer need not make queries of the others; else None."""

    is_in_last_layer: bool = False
    """Said by the model that runs."""

    known_product: Tensor | None = None
    """What a layer's attention would make first of its normalised input [T, E], where that
    was looked up by token id; None where it is to be made. Said by the model that runs."""

    def narrow(self, x: Tensor) -> Tensor:
        """Of values [T, ...] of all tokens, those [N, ...] that what is wanted depends on.

        A layer asks once its keys and values are made: behind those of the last layer nothing
        depends on the other tokens any more.
        """
        if self.wanted is None or not self.is_in_last_layer:
            return x
        return x.index_select(0, self.wanted)

    @property
    def narrow_attention(self) -> AttentionMetadata | None:
        """Where the wanted tokens stand, for a layer that makes queries of them alone once
        it has stored all keys and values; None where it makes them of all tokens."""
        return self.wanted_attention if self.is_in_last_layer else None


def attention_spec(config: PretrainedConfig, number: int) -> AttentionSpec:
    """What the queries of the model's layer ``number`` see, and how they are scored."""
    scale = (config.query_scale or config.head_size) ** -0.5
    return AttentionSpec(
        scale=scale / (number + 1) if config.attn_divided_by_layer else scale,
        window=config.window_of(number),
        soft_cap=config.attn_soft_cap,
    )


class AttentionBackend(Protocol):
    """Attention of one step's queries over a paged KV cache."""

    name: str
    """What logs and metrics call it."""

    spec: AttentionSpec

    def limit(self, window: int, num_sinks: int) -> None:
        """Let queries see ``window`` tokens back, themselves included, and the first
        ``num_sinks`` of the sequence. Before the first step."""
        ...

    def forward(
        self,
        query_TNH: Tensor,
        key_TKH: Tensor,
        value_TKH: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Write keys and values to their slots, then attend causally. Returns [T, N, H]."""
        ...

    def rotate_and_attend(
        self,
        heads_TAH: Tensor,
        rotary: RotaryEmbedding,
        positions_T: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Rotate queries and keys, write keys and values to their slots, then attend.

        ``heads`` holds the N queries, then the K keys and K values of each token; what is
        left of it is undefined. Returns [T, N, H].
        """
        ...

    def attend(
        self, query_TNH: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Attend to keys and values that are in their slots already. Returns [T, N, H]."""
        ...
