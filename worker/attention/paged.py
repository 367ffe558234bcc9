"""Attention over the paged cache with the operators of the device."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from trimaran.kernels.attention import (
    AttentionMetadata,
    AttentionSpec,
    HeadNorms,
    LatentHeads,
    LatentRows,
    Rotation,
)
from trimaran.kernels.operators import Ops
from trimaran.kernels.quantized import ByteInputs, ByteRows
from trimaran.worker.layers.rotary import RotaryEmbedding

# Shapes: T tokens of the step, N query heads, K key-value heads, A = N + 2 K, H head size,
# V dims of a value.


class PagedAttention:
    """Writes the step's keys and values, then attends; decodes and prompt chunks mix."""

    def __init__(self, ops: Ops, spec: AttentionSpec) -> None:
        self._ops = ops
        self.spec = spec
        self.name = ops.backends["paged_attention"]

    def limit(self, window: int, num_sinks: int) -> None:
        """Restrict queries to a window of ``window`` tokens, the query's included, and the
        first ``num_sinks`` tokens of the sequence. Called before the first step."""
        self.spec = replace(self.spec, window=window, num_sinks=num_sinks)

    def quantize_cache(self, scales_4K: Tensor) -> None:
        """Store and read keys and values of one byte a number. Called before the first
        step."""
        self.spec = replace(self.spec, kv_scales=scales_4K)

    def forward(
        self,
        query_TNH: Tensor,
        key_TKH: Tensor,
        value_TKH: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Write keys and values to their slots, then attend causally. Returns [T, N, H]."""
        slots_T, scales_4K = metadata.slot_mapping, self.spec.kv_scales
        self._ops.write_kv(key_TKH, value_TKH, kv_cache, slots_T, scales_4K)
        return self.attend(query_TNH, kv_cache, metadata)

    def rotate_and_attend(
        self,
        heads_TAH: Tensor,
        rotary: RotaryEmbedding,
        positions_T: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Rotate queries and keys, write keys and values to their slots, then attend."""
        # If angles depend on a sequence's length, a position alone does not determine them.
        if not rotary.switch_at:
            output_TNH = self._ops.rotated_attention(
                heads_TAH,
                rotary.cos_sin,
                kv_cache,
                metadata,
                self.spec,
                rotary.is_neox,
                norms,
            )
            if output_TNH is not None:
                return output_TNH
        slots_T, scales_4K = metadata.slot_mapping, self.spec.kv_scales
        rotary.forward(heads_TAH, positions_T, kv_cache, slots_T, scales_4K, norms)
        query_TNH = heads_TAH[:, : -2 * kv_cache.shape[3]]
        return self.attend(query_TNH, kv_cache, metadata)

    def rotate_and_quantize(
        self,
        heads_TAH: Tensor,
        rotary: RotaryEmbedding,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        inputs: ByteInputs,
        norms: HeadNorms | None = None,
    ) -> ByteRows | None:
        """See `AttentionBackend`."""
        if rotary.switch_at:
            return None
        return self._ops.quantized_attention(
            heads_TAH,
            rotary.cos_sin,
            kv_cache,
            metadata,
            self.spec,
            inputs,
            rotary.is_neox,
            norms,
        )

    def attend(
        self, query_TNH: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Attend to keys and values that were written earlier. Returns [T, N, H]."""
        return self._ops.paged_attention(query_TNH, kv_cache, metadata, self.spec)

    def decode_latents(
        self,
        rows: LatentRows,
        rotation: Rotation,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        heads: LatentHeads,
    ) -> Tensor | None:
        """Normalise, rotate and store the step's latent vectors, and attend to them. Returns
        [T, N, V]; None, without effect, where the device has no such operator for the
        step."""
        return self._ops.decoded_latents(rows, rotation, kv_cache, metadata, self.spec, heads)

    def attend_to_latents(
        self,
        query_TNH: Tensor,
        vectors: tuple[Tensor, Tensor],
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        heads: LatentHeads,
    ) -> Tensor:
        """Attend to latent vectors that were written earlier. Returns [T, N, V].

        ``vectors`` are those of the step's own tokens, with their rotated keys.
        """
        return self._ops.latent_attention(
            query_TNH, *vectors, kv_cache, metadata, self.spec, heads
        )
