"""The inputs of a step's attention, and the interface of attention backends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trimaran.kernels.attention import AttentionMetadata, AttentionSpec, HeadNorms
from trimaran.kernels.quantized import ByteInputs, ByteRows
from trimaran.worker.attention.taps import LayerTaps
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
    """A layer's cache entry of one token. Layers with equal specs share a pool of blocks."""

    num_kv_heads: int
    """Heads on this rank."""

    head_size: int
    dtype: torch.dtype
    window: int = 0
    """Window of the queries in tokens, the query's included; 0 means no window."""

    is_latent: bool = False
    """Whether a token has one vector a head, which serves as key and value, instead of two."""

    def block_shape(self, block_size: int) -> tuple[int, int, int, int]:
        """A layer's block: keys and values (or latent vectors), tokens, heads, dims."""
        num_kinds = 1 if self.is_latent else 2
        return num_kinds, block_size, self.num_kv_heads, self.head_size

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in one layer."""
        return math.prod(self.block_shape(1)) * self.dtype.itemsize


@dataclass(slots=True, kw_only=True)
class ForwardContext:
    """The step's data that a layer may read, in addition to its input."""

    attention: AttentionMetadata

    kv_caches: Sequence[Tensor]
    """One tensor a layer of this rank's stage, [num_blocks, 2, B, K, H], or of latent vectors
    [num_blocks, 1, B, 1, H]: a view of the pool of all layers, with the pool's strides."""

    wanted: Tensor | None = None
    """int64, in the last stage: the tokens whose hidden states are wanted; None for all."""

    wanted_attention: AttentionMetadata | None = None
    """The tokens of ``wanted`` as decodes, each the last token of its sequence, if the last
    layer can skip the queries of the other tokens; else None."""

    is_in_last_layer: bool = False
    """Set by the model before each layer."""

    known_product: Tensor | None = None
    """The query, key and value product of a layer's normalised input [T, E], if it was looked
    up by token id; None if the layer computes it. Set by the model before each layer."""

    taps: LayerTaps | None = None
    """Keeps the inputs of some layers, if a network drafts from them."""

    @property
    def keeps_all(self) -> bool:
        """Whether `narrow` drops no rows in this layer."""
        return self.wanted is None or not self.is_in_last_layer

    def narrow(self, x: Tensor) -> Tensor:
        """Drop the rows of tokens that the wanted results do not depend on: [T, ...] to [N,
        ...].

        A layer calls this after it has stored its keys and values: in the last layer, no later
        result depends on the other tokens.
        """
        if self.wanted is None or self.keeps_all:
            return x
        return x.index_select(0, self.wanted)

    @property
    def narrow_attention(self) -> AttentionMetadata | None:
        """The wanted tokens as decodes, for a layer that computes only their queries after it
        has stored all keys and values; None if it computes all queries."""
        return self.wanted_attention if self.is_in_last_layer else None


def attention_spec(config: PretrainedConfig, number: int) -> AttentionSpec:
    """The window and the scoring of attention in the model's layer ``number``."""
    scale = (config.query_scale or config.head_size) ** -0.5
    return AttentionSpec(
        scale=scale / (number + 1) if config.attn_divided_by_layer else scale,
        window=config.window_of(number),
        soft_cap=config.attn_soft_cap,
    )


class AttentionBackend(Protocol):
    """Attention of one step's queries over a paged KV cache."""

    name: str
    """The backend's name in logs and metrics."""

    spec: AttentionSpec

    def limit(self, window: int, num_sinks: int) -> None:
        """Restrict queries to a window of ``window`` tokens, the query's included, and the
        first ``num_sinks`` tokens of the sequence. Called before the first step."""
        ...

    def quantize_cache(self, scales_4K: Tensor) -> None:
        """Store and read keys and values of one byte a number, with these scales of
        `kv_quantization.head_scales`. Called before the first step."""
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
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Rotate queries and keys, behind their ``norms`` if any, write keys and values to
        their slots, then attend.

        ``heads`` holds the N queries, then the K keys and K values of each token, and is
        overwritten. Returns [T, N, H].
        """
        ...

    def rotate_and_quantize(
        self,
        heads_TAH: Tensor,
        rotary: RotaryEmbedding,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        inputs: ByteInputs,
        norms: HeadNorms | None = None,
    ) -> ByteRows | None:
        """`rotate_and_attend`, with each query head as a group of the inputs of an FP8 product
        [T, N * H]; None, without effect, where the device has no kernel for the step."""
        ...

    def attend(
        self, query_TNH: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Attend to keys and values that were written earlier. Returns [T, N, H]."""
        ...
