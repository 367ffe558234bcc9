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
        if not self._ops.pads_to_longest or num_decodes in (0, num_sequences):
            return self._ops.paged_attention(
                query_TNH,
                kv_cache,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_tables,
                scale,
                metadata.max_query_len,
                metadata.max_seq_len,
            )
        # Apart, so that decodes are not padded to the length of the longest chunk.
        parts = [
            self._attend(query_TNH, kv_cache, metadata, sequences, scale)
            for sequences in (slice(0, num_decodes), slice(num_decodes, num_sequences))
        ]
        return torch.cat(parts)

    def _attend(
        self,
        query_TNH: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        sequences: slice,
        scale: float,
    ) -> Tensor:
        """Attention of the leading decodes, or of all sequences behind them."""
        first, end = sequences.start, sequences.stop
        # The leading sequences have one token each.
        tokens = slice(0, end) if first == 0 else slice(first, None)
        return self._ops.paged_attention(
            query_TNH[tokens],
            kv_cache,
            metadata.query_start_loc[first : end + 1] - first,
            metadata.seq_lens[sequences],
            metadata.block_tables[sequences],
            scale,
            1 if first == 0 else metadata.max_query_len,
            metadata.max_seq_len,
        )
