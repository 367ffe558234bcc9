"""Attention over latent vectors of sequences with one query each: Triton kernel and launch."""

from __future__ import annotations

from dataclasses import dataclass

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.triton.attention.decode import merge_splits, put_split, read_split
from trimaran.kernels.triton.attention.plan import (
    MIN_SPLIT,
    PROGRAMS_PER_SM,
    DecodePlan,
    plan_decodes,
)
from trimaran.kernels.triton.attention.scores import (
    load_tree,
    score_factors,
    sees,
    softmax_weights,
)
from trimaran.kernels.triton.launch import Launcher, padded_size

# Shapes: S sequences, N query heads, L dims of a latent vector, R of the rotated key behind it,
# H = L + R, B tokens of a block, I splits of all sequences.


_MANY = 128
"""Sequences of a step above which small tiles are faster: two programs fit a multiprocessor."""


@dataclass(frozen=True, slots=True)
class LatentDecodeConfig:
    """Launch parameters of the kernel."""

    heads: int
    """Query heads that share one read of the vectors."""

    tile: int
    """Vectors in one step of the loop."""

    num_warps: int
    num_stages: int = 2
    programs_per_sm: int = PROGRAMS_PER_SM
    min_split: int = MIN_SPLIT
    """This and the preceding field are those of `plan_decodes`."""

    @classmethod
    def of(
        cls, num_heads: int, itemsize: int, num_sequences: int, *, is_fixed: bool = False
    ) -> LatentDecodeConfig:
        """Tiles that fit a multiprocessor's memory with vectors of 576 dims; with ``is_fixed``
        the same for any number of sequences.

        Measured on an H200 for 16 heads in bf16, in microseconds a layer, the chosen tiles and
        64 vectors in five stages with three programs a multiprocessor: one sequence of 200
        tokens 14.0 and 16.4, 64 of them 16.4 and 17.6, 256 of them 32.5 and 66.1, 1,024 of them
        106 and 165, one of 2,000 21.2 and 23.3. Tiles of 32 take 15.7 for one sequence and 19.5
        for 64.
        """
        heads = min(max(16, triton.next_power_of_2(num_heads)), 64)
        if itemsize > 2:
            return cls(16, 16, 4)
        if heads == 16:
            if num_sequences > _MANY and not is_fixed:
                return cls(heads, 32, 4, 3, 2, 256)
            return cls(heads, 64, 8, 3, 1)
        # Blocks are looked up ahead of vectors: with fewer stages no vectors would be in flight
        # during a product. Tiles of 64 rows use another instruction, and have one stage more.
        return cls(heads, 64, 8, 2 if heads == 64 else 5)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def load_vectors(  # type: ignore[no-untyped-def]
    cache, table, keys, is_key, block_stride, token_stride, BLOCK: tl.constexpr,
    LATENT: tl.constexpr, LATENT_PADDED: tl.constexpr, ROTATED: tl.constexpr,
    ROTATED_PADDED: tl.constexpr,
):  # fmt: skip
    """A tile of latent vectors and of the rotated keys behind them; zero for masked keys."""
    dims, behind = tl.arange(0, LATENT_PADDED), tl.arange(0, ROTATED_PADDED)
    blocks = tl.load(table + keys // BLOCK, mask=is_key, other=0).to(tl.int64)
    place = cache + (blocks * block_stride + keys % BLOCK * token_stride)[:, None]
    is_latent = is_key[:, None] & (dims < LATENT)[None, :]
    is_rotated = is_key[:, None] & (behind < ROTATED)[None, :]
    latent = tl.load(place + dims[None, :], mask=is_latent, other=0.0)
    return latent, tl.load(place + LATENT + behind[None, :], mask=is_rotated, other=0.0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def load_queries(  # type: ignore[no-untyped-def]
    place, is_row, LATENT: tl.constexpr, LATENT_PADDED: tl.constexpr, ROTATED: tl.constexpr,
    ROTATED_PADDED: tl.constexpr,
):  # fmt: skip
    """Rows of queries: the dims for latent vectors and the dims for rotated keys."""
    dims, behind = tl.arange(0, LATENT_PADDED)[None, :], tl.arange(0, ROTATED_PADDED)[None, :]
    near = tl.load(place[:, None] + dims, mask=is_row[:, None] & (dims < LATENT), other=0.0)
    is_rotated = is_row[:, None] & (behind < ROTATED)
    return near, tl.load(place[:, None] + LATENT + behind, mask=is_rotated, other=0.0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def latent_step(  # type: ignore[no-untyped-def]
    near, far, latent, rotated, is_seen, scale, cap, top, total, acc, HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of vectors: the running maximum, sum and weighted vectors."""
    scores = tl.dot(near, tl.trans(latent), input_precision=PRECISION)
    scores = tl.dot(far, tl.trans(rotated), scores, input_precision=PRECISION)
    weights, top, total, decay = softmax_weights(
        scores, is_seen, scale, cap, top, total, HAS_CAP, True
    )
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision=PRECISION)
    return top, total, acc


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _store_split(  # type: ignore[no-untyped-def]
    place, result, mask, partial, log_sums, counter, split, first_split, num_splits, heads,
    is_head, top, total, NUM_HEADS: tl.constexpr, LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Store the result of a sequence's only split; the last of several splits combines all."""
    if num_splits == 1:
        tl.store(place, result.to(place.dtype.element_ty), mask=mask)
    else:
        is_last = put_split(
            partial, log_sums, counter, split, heads, num_splits, is_head, mask, top, total,
            result, NUM_HEADS, LATENT, LATENT_PADDED,
        )  # fmt: skip
        if is_last:
            result = merge_splits(
                partial, log_sums, first_split, num_splits, heads, is_head, NUM_HEADS, LATENT,
                LATENT_PADDED, HEADS,
            )  # fmt: skip
            tl.store(place, result.to(place.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _latent_decode_kernel(  # type: ignore[no-untyped-def]
    query, cache, output, splits, counters, partial, log_sums, tables, seq_lens, tree_masks,
    scale, cap, query_stride, output_stride, table_stride, block_stride, token_stride,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr, ROTATED: tl.constexpr, ROTATED_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SINKS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_TREE: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One split of a sequence's vectors for HEADS query heads.

    Splits and partial results have the same layout as in attention with separate keys and
    values.
    """
    GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    group, dims = tl.program_id(0) % GROUPS, tl.arange(0, LATENT_PADDED)
    heads = group * HEADS + tl.arange(0, HEADS)
    is_head = heads < NUM_HEADS
    mask = is_head[:, None] & (dims < LATENT)[None, :]
    first, step = tl.program_id(0) // GROUPS, tl.num_programs(0) // GROUPS
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    for split in range(first, tl.load(splits), step):
        sequence, row, start, end, first_split, num_splits, skipped = read_split(splits, split)
        near, far = load_queries(
            query + sequence * query_stride + heads * (LATENT + ROTATED), is_head, LATENT,
            LATENT_PADDED, ROTATED, ROTATED_PADDED,
        )  # fmt: skip
        top = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, LATENT_PADDED], tl.float32)
        table = tables + row * table_stride
        last, tree = load_tree(seq_lens, tree_masks, sequence, HAS_TREE)
        for at_key in range(start, end, TILE):
            keys = at_key + tl.arange(0, TILE)
            is_key = keys < end
            if HAS_WINDOW:
                keys = tl.where(keys < SINKS, keys, keys + skipped)
            latent, rotated = load_vectors(
                cache, table, keys, is_key, block_stride, token_stride, BLOCK, LATENT,
                LATENT_PADDED, ROTATED, ROTATED_PADDED,
            )  # fmt: skip
            is_seen = is_key & sees(tree, last - keys, HAS_TREE)
            top, total, acc = latent_step(
                near, far, latent, rotated, is_seen[None, :], scale, cap, top, total, acc,
                HAS_CAP, PRECISION,
            )  # fmt: skip
        place = output + sequence * output_stride + heads[:, None] * LATENT + dims[None, :]
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        _store_split(
            place, result, mask, partial, log_sums, counters + sequence * GROUPS + group, split,
            first_split, num_splits, heads, is_head, top, total, NUM_HEADS, LATENT,
            LATENT_PADDED, HEADS,
        )  # fmt: skip


_latent_decode = Launcher(_latent_decode_kernel)


def decode(
    query_SNH: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    output_SNL: Tensor,
    *,
    is_fixed: bool = False,
    config: LatentDecodeConfig | None = None,
) -> None:
    """Attention of the first S sequences of a step, one query each, into ``output``.

    ``kv_cache`` is [blocks, 1, B, 1, H], its last dim and a query's heads contiguous. With
    ``is_fixed`` a sequence's result does not depend on other sequences. The launch depends on
    the number of sequences alone, as in `triton_attention_decode`.
    """
    num_sequences, num_heads, size = query_SNH.shape
    latent = spec.latent_size
    config = config or LatentDecodeConfig.of(
        num_heads, query_SNH.element_size(), num_sequences, is_fixed=is_fixed
    )
    groups = triton.cdiv(num_heads, config.heads)
    key = ("latent", groups, num_heads, spec.window, spec.num_sinks, is_fixed)
    plan: DecodePlan | None = metadata.plans.get(key)
    if plan is None:
        sizes = num_heads, groups, latent
        plan = plan_decodes(
            metadata, spec, sizes, num_sequences, is_fixed, min_split=config.min_split,
            programs_per_sm=config.programs_per_sm,
        )  # fmt: skip
        metadata.plans[key] = plan
    scale, cap = score_factors(spec)
    masks = metadata.tree_masks
    args = (
        query_SNH, kv_cache, output_SNL, plan.splits, plan.counters, plan.partial,
        plan.log_sums, metadata.block_tables, metadata.seq_lens,
        metadata.seq_lens if masks is None else masks, scale, cap, query_SNH.stride(0),
        output_SNL.stride(0), metadata.block_tables.stride(0), kv_cache.stride(0),
        kv_cache.stride(2),
    )  # fmt: skip
    constants = (
        num_heads, config.heads, latent, max(16, padded_size(latent)), size - latent,
        max(16, padded_size(size - latent)), kv_cache.shape[2], config.tile, spec.num_sinks,
        spec.window > 0, spec.soft_cap > 0, masks is not None,
        "ieee" if query_SNH.dtype.itemsize == 4 else "tf32",
    )  # fmt: skip
    grid = plan.num_programs * groups, 1
    _latent_decode(grid, args, constants, config.num_warps, config.num_stages)
