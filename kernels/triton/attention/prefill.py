"""Paged attention of sequences with several queries each: Triton kernels and their launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.triton.attention.scores import (
    bias_of,
    bias_rows,
    first_sums,
    load_bias,
    load_scales,
    scales_of,
    score_factors,
    sinks_of,
    softmax_step,
    weighted_mean,
)

# Shapes: T tokens, S sequences, N query heads, K key-value heads, G = N / K, H head size,
# B tokens of a block, I tiles of queries at most.

_WRITERS = 16


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Launch parameters of the kernel."""

    tile_m: int
    """Rows of queries; a row is one query and head of the group."""

    tile_n: int
    """Keys in one step of the loop."""

    num_warps: int
    num_stages: int = 2

    @classmethod
    def of(cls, head_size: int, itemsize: int) -> PrefillConfig:
        """The fastest on an H200 for prompts of at least 2,048 tokens; wide heads are
        limited by memory.
        """
        if itemsize > 2:
            return cls(32, 32, 4)
        return cls(128, 128, 8) if head_size <= 128 else cls(64, 64, 4)


# The sequences behind a step's decodes begin at any address of the step's arrays.
@triton.jit(do_not_specialize=["query_start_loc", "rows", "num_sequences"])  # type: ignore[untyped-decorator,unused-ignore]
def _tiles_kernel(  # type: ignore[no-untyped-def]
    query_start_loc, rows, tiles, num_sequences, STEP: tl.constexpr, HAS_ROWS: tl.constexpr,
    SPAN: tl.constexpr, WRITERS: tl.constexpr,
):  # fmt: skip
    """Lists all tiles of STEP queries; each program writes every WRITERS-th of a sequence."""
    writer = tl.program_id(0)
    sequences = tl.arange(0, SPAN)
    is_sequence = sequences < num_sequences
    first = tl.load(query_start_loc + sequences, mask=is_sequence, other=0)
    end = tl.load(query_start_loc + sequences + 1, mask=is_sequence, other=0)
    row = sequences
    if HAS_ROWS:
        row = tl.load(rows + sequences, mask=is_sequence, other=0)
    num_tiles = (end - first + STEP - 1) // STEP
    behind = tl.cumsum(num_tiles)
    for number in range(writer, tl.max(num_tiles), WRITERS):
        is_tile = number < num_tiles
        # The last queries see most keys: they start first.
        at = tiles + (behind - number) * 4
        tl.store(at, sequences, mask=is_tile)
        tl.store(at + 1, row, mask=is_tile)
        tl.store(at + 2, number * STEP, mask=is_tile)
    if writer == 0:
        tl.store(tiles, tl.sum(num_tiles))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def find_tile(tile, tiles, query_start_loc, seq_lens):  # type: ignore[no-untyped-def]
    """A tile's sequence: its first token and queries, the tile's first query, past keys and
    row.
    """
    at = tiles + (1 + tile) * 4
    sequence, row, start_query = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    first = tl.load(query_start_loc + sequence)
    num_queries = tl.load(query_start_loc + sequence + 1) - first
    return first, num_queries, start_query, tl.load(seq_lens + sequence) - num_queries, row


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def sees(positions, keys, end, WINDOW: tl.constexpr, SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of a tile's keys each row sees."""
    is_seen = (keys[None, :] <= positions[:, None]) & (keys < end)[None, :]
    if WINDOW > 0:
        is_near = keys[None, :] > positions[:, None] - WINDOW
        is_seen = is_seen & (is_near | (keys < SINKS)[None, :])
    return is_seen


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _num_hidden(position, sink_end, WINDOW: tl.constexpr, TILE_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The keys that no query from a position on sees, rounded to whole tiles, apart from the
    sinks.
    """
    in_front = tl.maximum(position - WINDOW + 1, 0) // TILE_N * TILE_N
    return tl.maximum(in_front - sink_end, 0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _is_of_sequence(keys, position, end, WINDOW: tl.constexpr, SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The keys that any query from a position on sees. Blocks of other keys may have new
    owners.
    """
    is_key = keys < end
    if WINDOW > 0:
        # A new owner's values may be NaN, which a weight of zero would keep.
        is_key = is_key & ((keys > position - WINDOW) | (keys < SINKS))
    return is_key


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _load_tile(  # type: ignore[no-untyped-def]
    cache, table, keys, is_key, is_dim, block_stride, value_offset, token_stride,
    BLOCK: tl.constexpr, HAS_END: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """A tile of keys and their values; with HAS_END zero beyond the last key or dim."""
    if HAS_END:
        blocks = tl.load(table + keys // BLOCK, mask=is_key, other=0).to(tl.int64)
        mask = is_key[:, None] & is_dim[None, :]
    else:
        blocks = tl.load(table + keys // BLOCK).to(tl.int64)
        mask = is_dim[None, :]
    place = cache + (blocks * block_stride + keys % BLOCK * token_stride)[:, None]
    if IS_WHOLE:
        return tl.load(place), tl.load(place + value_offset)
    k = tl.load(place, mask=mask, other=0.0)
    return k, tl.load(place + value_offset, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["query_start_loc", "seq_lens", "tables"])  # type: ignore[untyped-decorator,unused-ignore]
def _prefill_kernel(  # type: ignore[no-untyped-def]
    query, cache, output, tiles, query_start_loc, seq_lens, tables, bias, kv_scales, sinks,
    scale, cap, bias_stride, query_stride, output_stride, table_stride, block_stride,
    value_offset, token_stride, head_stride, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a sequence's queries, of all heads that share a key-value head."""
    kv_head, tile = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    if tile >= tl.load(tiles):
        return
    first, num_queries, start, past, row = find_tile(tile, tiles, query_start_loc, seq_lens)
    step: tl.constexpr = TILE_M // GROUP
    rows, dims = tl.arange(0, TILE_M), tl.arange(0, HEAD_PADDED)
    queries, heads = start + rows // GROUP, kv_head * GROUP + rows % GROUP
    is_row = (queries < num_queries) & (rows < step * GROUP)
    places, is_dim = (first + queries).to(tl.int64), dims < HEAD
    mask, from_head = is_row[:, None] & is_dim[None, :], heads[:, None] * HEAD + dims[None, :]
    q = tl.load(query + places[:, None] * query_stride + from_head, mask=mask, other=0.0)
    top, total, acc = first_sums(sinks + heads, is_row, q, HAS_SINKS)
    table, positions = tables + row.to(tl.int64) * table_stride, past + queries
    from_bias = bias_rows(bias, bias_stride, kv_head, heads, is_row, GROUP)
    scale, of_values = load_scales(kv_scales, kv_head, scale, KV_HEADS, HAS_SCALES)
    from_cache = cache + kv_head * head_stride + dims[None, :]
    end = past + tl.minimum(start + step, num_queries)
    sink_end: tl.constexpr = (SINKS + TILE_N - 1) // TILE_N * TILE_N
    # All queries of the tile see the keys before this one.
    masked_from = (past + start + 1) // TILE_N * TILE_N
    skipped = 0
    if WINDOW > 0:
        skipped = _num_hidden(past + start, sink_end, WINDOW, TILE_N)
        masked_from = 0
    for at in range(0, masked_from, TILE_N):
        keys = at + tl.arange(0, TILE_N)
        k, v = _load_tile(
            from_cache, table, keys, keys < end, is_dim, block_stride, value_offset,
            token_stride, BLOCK, False, HEAD == HEAD_PADDED,
        )  # fmt: skip
        raised = load_bias(from_bias, keys, keys < end, HAS_BIAS)
        top, total, acc = softmax_step(
            q, k.to(q.dtype), v.to(q.dtype), 0, raised, scale, cap, top, total, acc, HAS_BIAS,
            HAS_CAP, False, PRECISION,
        )  # fmt: skip
    for at in range(masked_from, end - skipped, TILE_N):
        keys = at + tl.arange(0, TILE_N)
        if WINDOW > 0:
            keys = tl.where(at < sink_end, keys, keys + skipped)
        k, v = _load_tile(
            from_cache, table, keys, _is_of_sequence(keys, past + start, end, WINDOW, SINKS),
            is_dim, block_stride, value_offset, token_stride, BLOCK, True, False,
        )  # fmt: skip
        raised = load_bias(from_bias, keys, keys < end, HAS_BIAS)
        top, total, acc = softmax_step(
            q, k.to(q.dtype), v.to(q.dtype), sees(positions, keys, end, WINDOW, SINKS), raised,
            scale, cap, top, total, acc, HAS_BIAS, HAS_CAP, True, PRECISION,
        )  # fmt: skip
    result = weighted_mean(acc, total, of_values, HAS_SCALES).to(output.dtype.element_ty)
    tl.store(output + places[:, None] * output_stride + from_head, result, mask=mask)


def plan_tiles(metadata: AttentionMetadata, num_tokens: int, step: int) -> tuple[Tensor, int]:
    """All tiles of ``step`` queries behind the leading decodes, and their maximum number.

    int32 [1 + I, 4]: their number; then for each tile its sequence, row and first query; one
    unused. Computed once a step.
    """
    first = metadata.num_decodes
    num_sequences = metadata.seq_lens.shape[0] - first
    most = triton.cdiv(num_tokens - first, step) + num_sequences
    key = ("prefill", first, step)
    tiles: Tensor | None = metadata.plans.get(key)
    if tiles is None:
        starts = metadata.query_start_loc[first:]
        tiles = torch.empty((1 + most, 4), dtype=torch.int32, device=starts.device)
        has_rows = metadata.rows is not None
        _tiles_kernel[(_WRITERS,)](
            starts, starts if metadata.rows is None else metadata.rows[first:], tiles,
            num_sequences, STEP=step, HAS_ROWS=has_rows,
            SPAN=max(16, triton.next_power_of_2(num_sequences)), WRITERS=_WRITERS,
        )  # fmt: skip
        metadata.plans[key] = tiles
    return tiles, most


def prompt_tables(metadata: AttentionMetadata) -> Tensor:
    """The block tables that a tile's row indexes."""
    tables = metadata.block_tables
    return tables if metadata.rows is not None else tables[metadata.num_decodes :]


def prefill(
    query_TNH: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    output_TNH: Tensor,
    *,
    config: PrefillConfig | None = None,
) -> None:
    """Attention of all sequences after the leading decodes, written to their tokens'
    ``output``.

    ``kv_cache`` [blocks, 2, B, K, H] may have any strides but 1 in its last dim. A sequence's
    result does not depend on other sequences.
    """
    num_tokens, num_heads, head_size = query_TNH.shape
    num_kv_heads = kv_cache.shape[3]
    group = num_heads // num_kv_heads
    config = config or PrefillConfig.of(head_size, query_TNH.element_size())
    tile_m = max(config.tile_m, triton.next_power_of_2(group))
    first = metadata.num_decodes
    tiles, most = plan_tiles(metadata, num_tokens, tile_m // group)
    starts, tables = metadata.query_start_loc[first:], prompt_tables(metadata)
    scale, cap = score_factors(spec)
    bias, bias_stride = bias_of(spec, query_TNH)
    strides = kv_cache.stride()
    _prefill_kernel[(most * num_kv_heads,)](
        query_TNH, kv_cache, output_TNH, tiles, starts, metadata.seq_lens[first:], tables,
        bias, scales_of(spec, query_TNH), sinks_of(spec, query_TNH), scale, cap,
        bias_stride, query_TNH.stride(0), output_TNH.stride(0), tables.stride(0),
        strides[0], strides[1], strides[2], strides[3],
        KV_HEADS=num_kv_heads, GROUP=group, HEAD=head_size,
        HEAD_PADDED=max(16, triton.next_power_of_2(head_size)), BLOCK=kv_cache.shape[2],
        TILE_M=tile_m, TILE_N=config.tile_n, WINDOW=spec.window, SINKS=spec.num_sinks,
        HAS_BIAS=spec.position_bias is not None, HAS_CAP=spec.soft_cap > 0,
        HAS_SCALES=spec.kv_scales is not None, HAS_SINKS=spec.sink_logits is not None,
        PRECISION="ieee" if query_TNH.dtype is torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
