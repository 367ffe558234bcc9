"""What attention needs of one step, and the interface that every attention backend serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Shapes: T tokens of the step, S sequences of the step, M blocks of the longest sequence,
# N query heads, K key-value heads, H head size, B tokens of a block.


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """What one layer keeps for one token. Layers with equal specs share a pool of blocks."""

    num_kv_heads: int
    """Heads on this rank."""

    head_size: int
    dtype: torch.dtype
    window: int = 0
    """Tokens a query looks back at, itself included; 0 means all."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value in one layer."""
        return 2 * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(slots=True, kw_only=True)
class AttentionMetadata:
    """Where the tokens of one step stand in their sequences and in the KV cache.

    Tensors are on the model's device; the integers are upper bounds known to the host, so
    that no backend waits for the device.
    """

    query_start_loc: Tensor
    """int32 [S + 1]: sequence s owns the step's tokens ``[loc[s], loc[s + 1])``."""

    seq_lens: Tensor
    """int32 [S]: tokens of the sequence in the cache after this step."""

    block_tables: Tensor
    """int32 [S, M]: blocks of each sequence; entries beyond its length are ignored."""

    slot_mapping: Tensor
    """int64 [T]: ``block * B + offset`` that each token's KV goes to."""

    max_query_len: int
    max_seq_len: int

    num_decodes: int = 0
    """How many leading sequences have exactly one query token. 0 is always right; the
    true number lets a backend treat decodes and prompt chunks apart."""


@dataclass(slots=True, kw_only=True)
class ForwardContext:
    """What a layer may read of the step beside its input."""

    attention: AttentionMetadata

    kv_caches: Sequence[Tensor]
    """One tensor a layer of this rank's stage, [num_blocks, 2, B, K, H]: views
    ``pool[:, layer]`` of the block-major pool, so block strides are larger than a block."""


class AttentionBackend(Protocol):
    """Attention of one step's queries over a paged KV cache."""

    name: str
    """What logs and metrics call it."""

    def forward(
        self,
        query_TNH: Tensor,
        key_TKH: Tensor,
        value_TKH: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        """Write keys and values to their slots, then attend causally. Returns [T, N, H]."""
        ...
