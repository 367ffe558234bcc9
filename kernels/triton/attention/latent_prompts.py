"""Attention of prompts over keys and values expanded from latent vectors: Triton kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from trimaran.kernels.attention import AttentionMetadata, AttentionSpec, LatentHeads
from trimaran.kernels.triton.attention.latent_decode import decode
from trimaran.kernels.triton.attention.latent_prefill import prefill
from trimaran.kernels.triton.attention.prefill import find_tile, plan_tiles
from trimaran.kernels.triton.attention.scores import score_factors, softmax_weights
from trimaran.kernels.triton.heads import head_linear

# Shapes: T tokens, N heads, P dims of a key from the latent vector, followed by R rotated dims,
# H = P + R, V dims of a value, L dims of a latent vector.


@dataclass(frozen=True, slots=True)
class PromptsConfig:
    """Launch parameters of the kernel."""

    tile_m: int = 128
    """Queries."""

    tile_n: int = 64
    """Keys in one step of the loop."""

    num_warps: int = 8
    num_stages: int = 3


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _step(  # type: ignore[no-untyped-def]
    near, far, sources, first, at, end, queries, rotated_stride, scale, cap, top, total, acc,
    NUM_HEADS: tl.constexpr, PLAIN: tl.constexpr, ROTATED: tl.constexpr, VALUE: tl.constexpr,
    TILE_N: tl.constexpr, HAS_CAP: tl.constexpr, IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile of keys from ``at`` on; a sequence's tokens begin at ``first``."""
    keys, rotated, values = sources
    plain, behind = tl.arange(0, near.shape[1])[None, :], tl.arange(0, far.shape[1])[None, :]
    dims, key = tl.arange(0, acc.shape[1])[None, :], at + tl.arange(0, TILE_N)
    tokens = (first + key).to(tl.int64)[:, None]
    is_key = (key < end)[:, None] if IS_MASKED else (key >= 0)[:, None]
    place = keys + tokens * (NUM_HEADS * PLAIN)
    k = tl.load(place + plain, mask=is_key & (plain < PLAIN), other=0.0)
    place = rotated + tokens * rotated_stride
    r = tl.load(place + behind, mask=is_key & (behind < ROTATED), other=0.0)
    place = values + tokens * (NUM_HEADS * VALUE)
    v = tl.load(place + dims, mask=is_key & (dims < VALUE), other=0.0)
    scores = tl.dot(near, tl.trans(k), input_precision=PRECISION)
    scores = tl.dot(far, tl.trans(r), scores, input_precision=PRECISION)
    is_seen = key[None, :] <= queries[:, None]
    weights, top, total, decay = softmax_weights(
        scores, is_seen, scale, cap, top, total, HAS_CAP, IS_MASKED
    )
    acc = acc * decay[:, None]
    return top, total, tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["query_start_loc", "seq_lens"])  # type: ignore[untyped-decorator,unused-ignore]
def _prompts_kernel(  # type: ignore[no-untyped-def]
    query, keys, rotated, values, output, past_output, past_log_sums, tiles, query_start_loc,
    seq_lens, scale, cap, query_stride, rotated_stride, NUM_HEADS: tl.constexpr,
    PLAIN: tl.constexpr, PLAIN_PADDED: tl.constexpr, ROTATED: tl.constexpr,
    ROTATED_PADDED: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HAS_CAP: tl.constexpr, HAS_PAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a sequence's queries of one head, over the step's tokens of the sequence.

    With HAS_PAST the softmax continues from the result over cached keys: an output, and the
    logarithm of its sum of weights.
    """
    head, tile = tl.program_id(0) % NUM_HEADS, tl.program_id(0) // NUM_HEADS
    if tile >= tl.load(tiles):
        return
    first, num_queries, start, _, _ = find_tile(tile, tiles, query_start_loc, seq_lens)
    plain, behind = tl.arange(0, PLAIN_PADDED)[None, :], tl.arange(0, ROTATED_PADDED)[None, :]
    dims = tl.arange(0, VALUE_PADDED)[None, :]
    queries = start + tl.arange(0, TILE_M)
    is_row = (queries < num_queries)[:, None]
    tokens = (first + queries).to(tl.int64)[:, None]
    rows = tokens * NUM_HEADS + head
    place = query + tokens * query_stride + head * (PLAIN + ROTATED)
    near = tl.load(place + plain, mask=is_row & (plain < PLAIN), other=0.0)
    far = tl.load(place + PLAIN + behind, mask=is_row & (behind < ROTATED), other=0.0)
    top = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, VALUE_PADDED], tl.float32)
    if HAS_PAST:
        at = past_log_sums + (first + queries).to(tl.int64) * NUM_HEADS + head
        top = tl.load(at, mask=queries < num_queries, other=float("-inf"))
        has_past = top > float("-inf")
        total = tl.where(has_past, 1.0, 0.0)
        mask = is_row & has_past[:, None] & (dims < VALUE)
        acc = tl.load(past_output + rows * VALUE + dims, mask=mask, other=0.0).to(tl.float32)
    end = tl.minimum(start + TILE_M, num_queries)
    sources = keys + head * PLAIN, rotated, values + head * VALUE
    # All queries of the tile see the keys before this one.
    masked_from = start // TILE_N * TILE_N
    for at in range(0, masked_from, TILE_N):
        top, total, acc = _step(
            near, far, sources, first, at, end, queries, rotated_stride, scale, cap, top,
            total, acc, NUM_HEADS, PLAIN, ROTATED, VALUE, TILE_N, HAS_CAP, False, PRECISION,
        )  # fmt: skip
    for at in range(masked_from, end, TILE_N):
        top, total, acc = _step(
            near, far, sources, first, at, end, queries, rotated_stride, scale, cap, top,
            total, acc, NUM_HEADS, PLAIN, ROTATED, VALUE, TILE_N, HAS_CAP, True, PRECISION,
        )  # fmt: skip
    result = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(output.dtype.element_ty)
    tl.store(output + rows * VALUE + dims, result, mask=is_row & (dims < VALUE))


def attend_prompts(
    query_TNH: Tensor,
    latent_TL: Tensor,
    key_TR: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    heads: LatentHeads,
    output_TNV: Tensor,
) -> None:
    """Attention of all sequences behind the leading decodes, into their tokens' ``output``.

    The step's own tokens get keys and values of each head, which takes a third of the
    operations of attention over latent vectors. Tokens cached before the step are attended as
    latent vectors, if the metadata allows for any. Windows are not supported. ``output`` and
    the heads of a token in ``query`` are contiguous. The split of a prompt into steps changes
    the rounding of a sequence's result.
    """
    num_heads, plain = heads.key_up.shape[0], heads.key_up.shape[2]
    vectors_TNL = latent_TL.unsqueeze(1).expand(-1, num_heads, -1)
    key_TNP = head_linear(vectors_TNL, heads.key_up.transpose(1, 2))
    value_TNV = head_linear(vectors_TNL, heads.value_up)
    past_TNV, log_sums_TN = output_TNV, output_TNV
    if metadata.has_past:
        absorbed = head_linear(query_TNH, heads.key_up)
        shape = query_TNH.shape[:2]
        log_sums_TN = torch.empty(shape, dtype=torch.float32, device=query_TNH.device)
        # Zeros without cached keys: the kernel multiplies all of them.
        past_TNL = absorbed.new_zeros((*shape, spec.latent_size))
        prefill(absorbed, kv_cache, metadata, spec, past_TNL, log_sums_TN)
        past_TNV = head_linear(past_TNL, heads.value_up)
    config = PromptsConfig() if query_TNH.dtype.itemsize == 2 else PromptsConfig(32, 16, 4, 2)
    tiles, most = plan_tiles(metadata, query_TNH.shape[0], config.tile_m)
    first, (rotated, value) = metadata.num_decodes, (key_TR.shape[1], output_TNV.shape[2])
    scale, cap = score_factors(spec)
    _prompts_kernel[(most * num_heads,)](
        query_TNH, key_TNP, key_TR, value_TNV, output_TNV, past_TNV, log_sums_TN, tiles,
        metadata.query_start_loc[first:], metadata.seq_lens[first:], scale, cap,
        query_TNH.stride(0), key_TR.stride(0), NUM_HEADS=num_heads, PLAIN=plain,
        PLAIN_PADDED=_padded(plain),
        ROTATED=rotated, ROTATED_PADDED=_padded(rotated), VALUE=value,
        VALUE_PADDED=_padded(value), TILE_M=config.tile_m, TILE_N=config.tile_n,
        HAS_CAP=spec.soft_cap > 0, HAS_PAST=metadata.has_past,
        PRECISION="ieee" if query_TNH.dtype.itemsize == 4 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def attend_step(
    query_TNH: Tensor,
    latent_TL: Tensor,
    key_TR: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    heads: LatentHeads,
) -> Tensor:
    """The attention of a step with prompts, [T, N, V]; its leading decodes attend to latent
    vectors.
    """
    output_TNV = query_TNH.new_empty((*query_TNH.shape[:2], heads.value_up.shape[1]))
    num_decodes = metadata.num_decodes
    if num_decodes:
        absorbed = head_linear(query_TNH[:num_decodes], heads.key_up)
        seen_SNL = absorbed.new_empty((*absorbed.shape[:2], spec.latent_size))
        decode(absorbed, kv_cache, metadata, spec, seen_SNL)
        output_TNV[:num_decodes] = head_linear(seen_SNL, heads.value_up)
    attend_prompts(query_TNH, latent_TL, key_TR, kv_cache, metadata, spec, heads, output_TNV)
    return output_TNV


def _padded(size: int) -> int:
    """The width of a tile that holds ``size`` dims."""
    return max(16, int(triton.next_power_of_2(size)))
