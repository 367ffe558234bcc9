"""Attention over the paged cache by the operators that were chosen for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from trimaran.kernels.dispatch import Ops
from trimaran.worker.attention.backend import AttentionMetadata


class PagedAttention:
    """Stores the step's keys and values, then attends; decodes and prompt chunks mix."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.name = ops.backends["paged_attention"]

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
        self._ops.write_kv(key_TKH, value_TKH, kv_cache, metadata.slot_mapping)
        num_decodes = metadata.num_decodes
        num_sequences = metadata.seq_lens.shape[0]
        if num_decodes in (0, num_sequences):
            return self._attend(query_TNH, kv_cache, metadata, (0, num_sequences), scale)
        # Apart, so that decodes are not padded to the length of the longest chunk.
        decodes = self._attend(query_TNH, kv_cache, metadata, (0, num_decodes), scale)
        rest = self._attend(query_TNH, kv_cache, metadata, (num_decodes, num_sequences), scale)
        return torch.cat((decodes, rest))

    def _attend(
        self,
        query_TNH: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        sequences: tuple[int, int],
        scale: float,
    ) -> Tensor:
        first, end = sequences
        num_decodes = metadata.num_decodes
        is_decode = 0 < end <= num_decodes
        starts = metadata.query_start_loc[first : end + 1]
        if first:
            # The leading sequences have one token each.
            query_TNH, starts = query_TNH[first:], starts - first
        elif is_decode:
            query_TNH = query_TNH[:end]
        return self._ops.paged_attention(
            query_TNH,
            kv_cache,
            starts,
            metadata.seq_lens[first:end],
            metadata.block_tables[first:end],
            scale,
            1 if is_decode else metadata.max_query_len,
            metadata.max_seq_len,
        )
