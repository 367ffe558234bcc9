"""Paged attention of sequences with one query each: Triton kernel and its launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.triton.attention.plan import DecodePlan, plan_decodes
from trimaran.kernels.triton.attention.scores import (
    bias_of,
    bias_rows,
    first_sums,
    load_bias,
    load_scales,
    load_tree,
    scales_of,
    score_factors,
    sees,
    sinks_of,
    softmax_step,
    weighted_mean,
)

# Shapes: S sequences, N query heads, K key-value heads, G = N / K, H head size, B tokens of a
# block, I splits of all sequences.


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch parameters of the kernel."""

    tile: int = 64
    """Keys in one step of the loop."""

    num_warps: int = 4
    num_stages: int = 2


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def merge_splits(  # type: ignore[no-untyped-def]
    partial, log_sums, first_split, num_splits, heads, is_head, NUM_HEADS: tl.constexpr,
    HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr, GROUP_PADDED: tl.constexpr,
):  # fmt: skip
    """Combines the partial results of a sequence's splits by their sums of weights, in
    order.
    """
    dims = tl.arange(0, HEAD_PADDED)
    top = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, HEAD_PADDED], tl.float32)
    mask = is_head[:, None] & (dims < HEAD)[None, :]
    for split in range(first_split, first_split + num_splits):
        place = split * NUM_HEADS + heads
        # Other multiprocessors wrote these: bypass the L1 cache.
        log_sum = tl.load(log_sums + place, mask=is_head, other=0.0, cache_modifier=".cg")
        value = tl.load(
            partial + place[:, None] * HEAD + dims[None, :], mask=mask, other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        new_top = tl.maximum(top, log_sum)
        decay, weight = tl.exp2(top - new_top), tl.exp2(log_sum - new_top)
        acc = acc * decay[:, None] + value * weight[:, None]
        total = total * decay + weight
        top = new_top
    return acc / total[:, None]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def put_split(  # type: ignore[no-untyped-def]
    partial, log_sums, counter, split, heads, num_splits, is_head, mask, top, total, result,
    NUM_HEADS: tl.constexpr, HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr,
):  # fmt: skip
    """Stores and counts a partial result; returns whether all splits of the sequence are
    done."""
    place = split * NUM_HEADS + heads
    dims = tl.arange(0, HEAD_PADDED)
    tl.store(partial + place[:, None] * HEAD + dims[None, :], result, mask=mask)
    tl.store(log_sums + place, top + tl.log2(total), mask=is_head)
    # All threads' stores come before the count.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def read_split(splits, split):  # type: ignore[no-untyped-def]
    """The fields of a split, in the order of `DecodePlan`."""
    at = splits + (1 + split) * 8
    sequence, row = tl.load(at).to(tl.int64), tl.load(at + 1).to(tl.int64)
    start, end, first_split = tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    return sequence, row, start, end, first_split, tl.load(at + 5), tl.load(at + 6)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def places_of(table, keys, is_key, block_stride, token_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the keys of a tile lie in the cache, [keys, 1]."""
    blocks = tl.load(table + keys // BLOCK, mask=is_key, other=0).to(tl.int64)
    return (blocks * block_stride + keys % BLOCK * token_stride)[:, None]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _decode_kernel(  # type: ignore[no-untyped-def]
    query, cache, output, splits, counters, partial, log_sums, tables, bias, kv_scales, sinks,
    seq_lens, tree_masks, scale, cap, bias_stride, query_stride, output_stride, table_stride,
    block_stride, value_offset, token_stride, head_stride, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_TREE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of a sequence's keys for the query heads of one key-value head.

    The only split of a sequence writes to ``output`` [S, N, H]. The last of several combines
    their partial results."""
    kv_head, first = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    group, dims = tl.arange(0, GROUP_PADDED), tl.arange(0, HEAD_PADDED)
    heads, is_head, is_dim = kv_head * GROUP + group, group < GROUP, dims < HEAD
    head_mask = is_head[:, None] & is_dim[None, :]
    from_head = heads[:, None] * HEAD + dims[None, :]
    from_bias = bias_rows(bias, bias_stride, kv_head, heads, is_head, GROUP)
    scale, of_values = load_scales(kv_scales, kv_head, scale, KV_HEADS, HAS_SCALES)
    keys_of_head = cache + kv_head * head_stride + dims[None, :]
    for split in range(first, tl.load(splits), tl.num_programs(0) // KV_HEADS):
        sequence, row, start, end, first_split, num_splits, skipped = read_split(splits, split)
        q = tl.load(query + sequence * query_stride + from_head, mask=head_mask, other=0.0)
        is_own = is_head & (split == first_split)
        top, total, acc = first_sums(sinks + heads, is_own, q, HAS_SINKS)
        table = tables + row * table_stride
        last, tree = load_tree(seq_lens, tree_masks, sequence, HAS_TREE)
        for at_key in range(start, end, TILE):
            keys = at_key + tl.arange(0, TILE)
            is_key = keys < end
            if HAS_WINDOW:
                keys = tl.where(keys < SINKS, keys, keys + skipped)
            places = places_of(table, keys, is_key, block_stride, token_stride, BLOCK)
            place, mask = keys_of_head + places, is_key[:, None] & is_dim[None, :]
            k = tl.load(place, mask=mask, other=0.0).to(q.dtype)
            v = tl.load(place + value_offset, mask=mask, other=0.0).to(q.dtype)
            raised = load_bias(from_bias, keys, is_key, HAS_BIAS)
            seen = (is_key & sees(tree, last - keys, HAS_TREE))[None, :]
            top, total, acc = softmax_step(
                q, k, v, seen, raised, scale, cap, top, total, acc, HAS_BIAS, HAS_CAP, True,
                PRECISION,
            )  # fmt: skip
        to_output = output + sequence * output_stride + from_head
        result = weighted_mean(acc, total, of_values, HAS_SCALES)
        if num_splits == 1:
            tl.store(to_output, result.to(output.dtype.element_ty), mask=head_mask)
        else:
            is_last = put_split(
                partial, log_sums, counters + sequence * KV_HEADS + kv_head, split, heads,
                num_splits, is_head, head_mask, top, total, result, KV_HEADS * GROUP, HEAD,
                HEAD_PADDED,
            )  # fmt: skip
            if is_last:
                result = merge_splits(
                    partial, log_sums, first_split, num_splits, heads, is_head,
                    KV_HEADS * GROUP, HEAD, HEAD_PADDED, GROUP_PADDED,
                )  # fmt: skip
                tl.store(to_output, result.to(output.dtype.element_ty), mask=head_mask)


def decode(
    query_SNH: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    output_SNH: Tensor,
    *,
    is_fixed: bool = False,
    config: DecodeConfig | None = None,
) -> None:
    """Attention of the first S sequences of a step, one query each, into ``output``.

    ``kv_cache`` [blocks, 2, B, K, H] may have any strides but 1 in its last dim. With
    ``is_fixed`` a sequence's result does not depend on other sequences. The launch depends on
    the number of sequences alone: safe under CUDA graph capture, and a replay may have any
    lengths up to those of the block table.
    """
    num_sequences, num_heads, head_size = query_SNH.shape
    num_kv_heads = kv_cache.shape[3]
    heads = (num_heads, num_kv_heads, head_size)
    key = ("decode", heads, spec.window, spec.num_sinks, is_fixed)
    plan: DecodePlan | None = metadata.plans.get(key)
    if plan is None:
        plan = plan_decodes(metadata, spec, heads, num_sequences, is_fixed)
        metadata.plans[key] = plan
    config = config or DecodeConfig()
    scale, cap = score_factors(spec)
    bias, bias_stride = bias_of(spec, query_SNH)
    masks = metadata.tree_masks
    group = num_heads // num_kv_heads
    strides = kv_cache.stride()
    _decode_kernel[(plan.num_programs * num_kv_heads,)](
        query_SNH, kv_cache, output_SNH, plan.splits, plan.counters, plan.partial,
        plan.log_sums, metadata.block_tables, bias, scales_of(spec, query_SNH),
        sinks_of(spec, query_SNH), metadata.seq_lens,
        metadata.seq_lens if masks is None else masks, scale, cap, bias_stride,
        query_SNH.stride(0),
        output_SNH.stride(0), metadata.block_tables.stride(0),
        strides[0], strides[1], strides[2], strides[3],
        KV_HEADS=num_kv_heads, GROUP=group,
        GROUP_PADDED=max(16, triton.next_power_of_2(group)), HEAD=head_size,
        HEAD_PADDED=max(16, triton.next_power_of_2(head_size)), BLOCK=kv_cache.shape[2],
        TILE=config.tile, SINKS=spec.num_sinks, HAS_WINDOW=spec.window > 0,
        HAS_BIAS=spec.position_bias is not None, HAS_CAP=spec.soft_cap > 0,
        HAS_SCALES=spec.kv_scales is not None, HAS_SINKS=spec.sink_logits is not None,
        HAS_TREE=masks is not None,
        PRECISION="ieee" if query_SNH.dtype is torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
