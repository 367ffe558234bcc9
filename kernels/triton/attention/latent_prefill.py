"""Attention over latent vectors of sequences with several queries each: Triton kernel."""

from __future__ import annotations

from dataclasses import dataclass

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.triton.attention.latent_decode import (
    latent_step,
    load_queries,
    load_vectors,
)
from trimaran.kernels.triton.attention.prefill import (
    find_tile,
    plan_tiles,
    prompt_tables,
    sees,
)
from trimaran.kernels.triton.attention.scores import score_factors

# Shapes: T tokens, N query heads, L dims of a latent vector, R of the rotated key behind it,
# H = L + R, B tokens of a block.


@dataclass(frozen=True, slots=True)
class LatentPrefillConfig:
    """Launch parameters of the kernel."""

    rows: int
    """One a query and head."""

    heads: int
    """Query heads of a tile; its queries are ``rows / heads``."""

    tile: int
    """Vectors in one step of the loop."""

    num_warps: int
    num_stages: int = 2

    @classmethod
    def of(cls, num_heads: int, itemsize: int) -> LatentPrefillConfig:
        """The largest tiles that fit a multiprocessor's memory and registers with vectors of
        576 dims.
        """
        rows = 64 if itemsize == 2 else 16
        heads = min(triton.next_power_of_2(num_heads), rows)
        return cls(rows, heads, 64 if itemsize == 2 else 16, 8 if itemsize == 2 else 4)


@triton.jit(do_not_specialize=["query_start_loc", "seq_lens", "tables"])  # type: ignore[untyped-decorator,unused-ignore]
def _latent_prefill_kernel(  # type: ignore[no-untyped-def]
    query, cache, output, tiles, query_start_loc, seq_lens, tables, log_sums, scale, cap,
    query_stride, output_stride, table_stride, block_stride, token_stride,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr, ROTATED: tl.constexpr, ROTATED_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr, IS_PAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a sequence's queries, for HEADS of the heads.

    With IS_PAST, queries see only keys cached before the step. The logarithm of the sum of
    weights is then stored too; minus infinity, and no output, without such keys.
    """
    GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    group, tile = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    if tile >= tl.load(tiles):
        return
    first, num_queries, start, past, row = find_tile(tile, tiles, query_start_loc, seq_lens)
    step: tl.constexpr = ROWS // HEADS
    rows, dims = tl.arange(0, ROWS), tl.arange(0, LATENT_PADDED)
    queries, heads = start + rows // HEADS, group * HEADS + rows % HEADS
    is_row = (queries < num_queries) & (heads < NUM_HEADS)
    places = (first + queries).to(tl.int64)
    end = past if IS_PAST else past + tl.minimum(start + step, num_queries)
    if IS_PAST and past == 0:
        nothing = tl.full([ROWS], float("-inf"), tl.float32)
        tl.store(log_sums + places * NUM_HEADS + heads, nothing, mask=is_row)
        return
    near, far = load_queries(
        query + places * query_stride + heads * (LATENT + ROTATED), is_row, LATENT,
        LATENT_PADDED, ROTATED, ROTATED_PADDED,
    )  # fmt: skip
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, LATENT_PADDED], tl.float32)
    table, positions = tables + row.to(tl.int64) * table_stride, past + queries
    sink_end: tl.constexpr = (SINKS + TILE - 1) // TILE * TILE
    skipped = 0
    if WINDOW > 0:
        # Rounded to whole tiles, separately from the tiles of the sinks.
        in_front = tl.maximum(past + start - WINDOW + 1, 0) // TILE * TILE
        skipped = tl.maximum(in_front - sink_end, 0)
    for at in range(0, end - skipped, TILE):
        keys = at + tl.arange(0, TILE)
        if WINDOW > 0:
            keys = tl.where(at < sink_end, keys, keys + skipped)
        latent, rotated = load_vectors(
            cache, table, keys, keys < end, block_stride, token_stride, BLOCK, LATENT,
            LATENT_PADDED, ROTATED, ROTATED_PADDED,
        )  # fmt: skip
        top, total, acc = latent_step(
            near, far, latent, rotated, sees(positions, keys, end, WINDOW, SINKS), scale, cap,
            top, total, acc, HAS_CAP, PRECISION,
        )  # fmt: skip
    result = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(output.dtype.element_ty)
    place = output + places * output_stride + heads * LATENT
    mask = is_row[:, None] & (dims < LATENT)[None, :]
    tl.store(place[:, None] + dims[None, :], result, mask=mask)
    if IS_PAST:
        tl.store(log_sums + places * NUM_HEADS + heads, top + tl.log2(total), mask=is_row)


def prefill(
    query_TNH: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    output_TNL: Tensor,
    log_sums_TN: Tensor | None = None,
    *,
    config: LatentPrefillConfig | None = None,
) -> None:
    """Attention of all sequences after the leading decodes, written to their tokens'
    ``output``.

    ``kv_cache`` is [blocks, 1, B, 1, H], its last dim and a query's heads contiguous. A
    sequence's result does not depend on other sequences. With ``log_sums``, float32, queries
    see only keys cached before the step, and ``log_sums`` gets the base 2 logarithms of the
    sums of weights. A query without such keys gets minus infinity, and its ``output`` is
    unchanged.
    """
    num_tokens, num_heads, size = query_TNH.shape
    latent = spec.latent_size
    config = config or LatentPrefillConfig.of(num_heads, query_TNH.element_size())
    first = metadata.num_decodes
    tiles, most = plan_tiles(metadata, num_tokens, config.rows // config.heads)
    tables = prompt_tables(metadata)
    scale, cap = score_factors(spec)
    _latent_prefill_kernel[(most * triton.cdiv(num_heads, config.heads),)](
        query_TNH, kv_cache, output_TNL, tiles, metadata.query_start_loc[first:],
        metadata.seq_lens[first:], tables, output_TNL if log_sums_TN is None else log_sums_TN,
        scale, cap, query_TNH.stride(0), output_TNL.stride(0), tables.stride(0),
        kv_cache.stride(0), kv_cache.stride(2), NUM_HEADS=num_heads, HEADS=config.heads,
        ROWS=config.rows, LATENT=latent,
        LATENT_PADDED=max(16, triton.next_power_of_2(latent)), ROTATED=size - latent,
        ROTATED_PADDED=max(16, triton.next_power_of_2(size - latent)),
        BLOCK=kv_cache.shape[2], TILE=config.tile, WINDOW=spec.window, SINKS=spec.num_sinks,
        HAS_CAP=spec.soft_cap > 0, IS_PAST=log_sums_TN is not None,
        PRECISION="ieee" if query_TNH.dtype.itemsize == 4 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
