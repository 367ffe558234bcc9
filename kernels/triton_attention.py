"""Paged attention on a GPU: the Triton kernels and the Python function over them."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

# Shapes: T tokens, N query heads, K key-value heads, G = N / K, H head size, B tokens of a
# block, S sequences, C chunks of the longest sequence.

CHUNK = 256
"""Keys that one program takes in a decode. Fixed, so that a sequence's result does not depend
on the batch; one chunk's partial result is about 1 % of what it reads."""

_TILE_N = 64


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_keys(q, k, v, is_seen, scale, top, total, acc, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """One step of softmax over a tile of keys: the running maximum, sum and weighted values."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row may have seen no key yet: keep its exponents finite.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp(scores - shift[:, None])
    decay = tl.exp(top - shift)
    acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_top, total * decay + tl.sum(weights, 1), acc


# What changes from step to step must not lead to another compilation.
@triton.jit(do_not_specialize=["table_stride", "num_chunks"])  # type: ignore[untyped-decorator,unused-ignore]
def _attention_kernel(  # type: ignore[no-untyped-def]
    query, cache, output, log_sums, query_start_loc, seq_lens, block_tables, scale,
    query_stride, block_stride, table_stride, num_kv_heads, num_chunks,
    GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, CHUNK: tl.constexpr, IS_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a sequence's queries against one key-value head.

    A tile's rows are queries times the query heads of the group. Without IS_SPLIT a program
    takes all keys and writes ``output`` [T, N, H]; with it, one chunk of them, and a partial
    result [T, N, C, H] beside the logarithm of its weights' sum, ``log_sums`` [T, N, C].
    """
    sequence = tl.program_id(1)
    kv_head, chunk = tl.program_id(2) // num_chunks, tl.program_id(2) % num_chunks
    first = tl.load(query_start_loc + sequence)
    num_queries = tl.load(query_start_loc + sequence + 1) - first
    step: tl.constexpr = TILE_M // GROUP
    start_query = tl.program_id(0) * step
    if start_query >= num_queries:
        return
    past = tl.load(seq_lens + sequence) - num_queries
    end = past + tl.minimum(start_query + step, num_queries)
    start = chunk * CHUNK
    if IS_SPLIT:
        end = tl.minimum(end, start + CHUNK)
    rows, dims = tl.arange(0, TILE_M), tl.arange(0, HEAD_PADDED)
    queries = start_query + rows // GROUP
    tokens = (first + queries).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    is_dim = (dims < HEAD)[None, :]
    is_row = (queries < num_queries) & (rows < step * GROUP)
    from_query = tokens[:, None] * query_stride + heads[:, None] * HEAD + dims[None, :]
    q = tl.load(query + from_query, mask=is_row[:, None] & is_dim, other=0.0)
    top = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, HEAD_PADDED], tl.float32)
    token_stride = num_kv_heads * HEAD
    table = block_tables + sequence * table_stride
    for at in range(start, end, TILE_N):
        keys = at + tl.arange(0, TILE_N)
        is_key = keys < end
        blocks = tl.load(table + keys // BLOCK, mask=is_key, other=0).to(tl.int64)
        places = blocks * block_stride + keys % BLOCK * token_stride + kv_head * HEAD
        place = cache + places[:, None] + dims[None, :]
        k = tl.load(place, mask=is_key[:, None] & is_dim, other=0.0)
        v = tl.load(place + BLOCK * token_stride, mask=is_key[:, None] & is_dim, other=0.0)
        is_seen = is_key[None, :] & (keys[None, :] <= past + queries[:, None])
        top, total, acc = _add_keys(q, k, v, is_seen, scale, top, total, acc, PRECISION)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    pairs = (tokens * num_kv_heads * GROUP + heads) * num_chunks + chunk
    to_output = output + pairs[:, None] * HEAD + dims[None, :]
    tl.store(to_output, result.to(output.dtype.element_ty), mask=is_row[:, None] & is_dim)
    if IS_SPLIT:
        # A chunk behind the sequence's end has no weight.
        log_sum = tl.where(total == 0.0, float("-inf"), top + tl.log(tl.maximum(total, 1e-30)))
        tl.store(log_sums + pairs, log_sum, mask=is_row)


@triton.jit(do_not_specialize=["num_chunks"])  # type: ignore[untyped-decorator,unused-ignore]
def _merge_kernel(  # type: ignore[no-untyped-def]
    partial, log_sums, output, num_chunks, HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr
):
    """Weighs one head's partial results of all chunks by their sums."""
    pair = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HEAD_PADDED)
    top = tl.load(log_sums + pair * num_chunks)
    total = tl.exp(top - top)
    acc = tl.load(partial + pair * num_chunks * HEAD + dims, mask=dims < HEAD, other=0.0)
    for chunk in range(1, num_chunks):
        log_sum = tl.load(log_sums + pair * num_chunks + chunk)
        # The first chunk has keys, so the maximum is finite.
        new_top = tl.maximum(top, log_sum)
        decay, weight = tl.exp(top - new_top), tl.exp(log_sum - new_top)
        place = partial + (pair * num_chunks + chunk) * HEAD + dims
        value = tl.load(place, mask=dims < HEAD, other=0.0)
        acc = acc * decay + value * weight
        total = total * decay + weight
        top = new_top
    result = (acc / total).to(output.dtype.element_ty)
    tl.store(output + pair * HEAD + dims, result, mask=dims < HEAD)


def paged_attention(
    query_TNH: Tensor,
    kv_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
) -> Tensor:
    """Causal attention of each sequence's last tokens; see `reference.paged_attention`.

    Decodes are cut into chunks of keys that run side by side. Safe under CUDA graph capture
    where ``max_seq_len`` is a bound for the replays too.
    """
    num_tokens, num_heads, head_size = query_TNH.shape
    _, _, block_size, num_kv_heads, _ = kv_cache.shape
    group = num_heads // num_kv_heads
    is_split = max_query_len == 1 and max_seq_len > CHUNK
    num_chunks = triton.cdiv(max_seq_len, CHUNK) if is_split else 1
    tile_m = max(16, triton.next_power_of_2(group))
    if max_query_len > 1:
        tile_m = max(64, tile_m)
    output = torch.empty_like(query_TNH, memory_format=torch.contiguous_format)
    target, log_sums = output, output
    if is_split:
        pairs = (num_tokens, num_heads, num_chunks)
        target = torch.empty((*pairs, head_size), dtype=torch.float32, device=output.device)
        log_sums = torch.empty(pairs, dtype=torch.float32, device=output.device)
    grid = (
        triton.cdiv(max_query_len, tile_m // group),
        seq_lens.shape[0],
        num_kv_heads * num_chunks,
    )
    head_padded = triton.next_power_of_2(max(16, head_size))
    _attention_kernel[grid](
        query_TNH, kv_cache, target, log_sums, query_start_loc, seq_lens, block_tables, scale,
        query_TNH.stride(0), kv_cache.stride(0), block_tables.stride(0), num_kv_heads,
        num_chunks, GROUP=group, HEAD=head_size, HEAD_PADDED=head_padded,
        BLOCK=block_size, TILE_M=tile_m, TILE_N=_TILE_N, CHUNK=CHUNK, IS_SPLIT=is_split,
        PRECISION="ieee" if query_TNH.dtype is torch.float32 else "tf32",
    )  # fmt: skip
    if is_split:
        _merge_kernel[(num_tokens * num_heads,)](
            target, log_sums, output, num_chunks, HEAD=head_size, HEAD_PADDED=head_padded
        )  # fmt: skip
    return output
