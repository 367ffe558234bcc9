"""Rotation of query and key heads on a GPU, and storing keys and values at their slots."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.attention import HeadNorms
from trimaran.kernels.triton.launch import Launcher, num_tiles, padded_size
from trimaran.kernels.triton.norm import norm_heads

# Shapes: T tokens, N query heads, K key-value heads, H head size, A = N + 2 K all heads, P
# positions, R rotated dims of a head, B tokens of a block.


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _inverse_of(scales, head, mask, num_kv, HAS_SCALES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inverse scales of heads: those of all keys, then of all values, behind the scales."""
    inverse = 1.0
    if HAS_SCALES:
        inverse = tl.load(scales + 2 * num_kv + head, mask=mask, other=0.0)
    return inverse


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _stored(value, inverse, cache, HAS_SCALES: tl.constexpr):  # type: ignore[no-untyped-def]
    """A key or value as the cache holds it, see `kv_quantization.quantize_heads`."""
    if HAS_SCALES:
        element = cache.dtype.element_ty
        value = value.to(tl.float32) * inverse
        if element == tl.int8:
            # The sum has no bits behind the point: it rounds to even.
            value = tl.minimum(tl.maximum(value, -127.0), 127.0)
            value = (value + 12582912.0) - 12582912.0
        else:
            value = tl.minimum(tl.maximum(value, -448.0), 448.0)
        value = value.to(element)
    return value


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _store_rest(  # type: ignore[no-untyped-def]
    source, target, is_cached, inverse, cache, HEAD_SIZE: tl.constexpr, ROTATED: tl.constexpr,
    REST: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Store the dims of keys and values that are not rotated."""
    behind = ROTATED + tl.arange(0, REST)[None, :]
    is_kept = is_cached & (behind < HEAD_SIZE)
    rest = tl.load(source + behind, mask=is_kept, other=0.0)
    tl.store(target + behind, _stored(rest, inverse, cache, HAS_SCALES), mask=is_kept)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _normed_halves(  # type: ignore[no-untyped-def]
    left, right, query_norm, key_norm, is_query, is_pair, eps, element: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Root-mean-square normalisation of heads, given as halves, by two weights; rounded as by a
    kernel of its own.
    """
    mean = (tl.sum(left * left, 1) + tl.sum(right * right, 1)) / (2 * HALF)
    factor = tl.rsqrt(mean + eps)[:, None]
    lower = tl.where(
        is_query,
        tl.load(query_norm, mask=is_pair, other=0.0),
        tl.load(key_norm, mask=is_pair, other=0.0),
    )
    upper = tl.where(
        is_query,
        tl.load(query_norm + HALF, mask=is_pair, other=0.0),
        tl.load(key_norm + HALF, mask=is_pair, other=0.0),
    )
    left, right = left * factor * lower.to(tl.float32), right * factor * upper.to(tl.float32)
    return left.to(element).to(tl.float32), right.to(element).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _angles_of(cos_sin, position, pairs, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cosines and sines of a position, [1, pairs]."""
    angles = cos_sin + position.to(tl.int64) * 2 * HALF + pairs
    cos = tl.load(angles, mask=pairs < HALF, other=0.0)[None, :]
    return cos, tl.load(angles + HALF, mask=pairs < HALF, other=0.0)[None, :]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rope_and_cache_kernel(  # type: ignore[no-untyped-def]
    heads, cos_sin, positions, cache, slots, scales, query_norm, key_norm, token_stride,
    num_queries, num_kv, block_stride, kind_stride, place_stride, head_stride, eps,
    BLOCK: tl.constexpr, HEAD_SIZE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    REST: tl.constexpr, HEADS: tl.constexpr, IS_NEOX: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_NORMS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (t, g) handles the g-th ``HEADS`` heads of token t, of any kind."""
    token, pairs = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    if OVERLAPS:
        gdc_launch_dependents()
    # Positions and slots are complete before the step's first layer, see `rope_and_cache`.
    position, slot = tl.load(positions + token), tl.load(slots + token)
    is_head = (head < num_queries + 2 * num_kv)[:, None]
    is_rotated = (head < num_queries + num_kv)[:, None]
    is_cached = is_head & (head >= num_queries)[:, None]
    kv_head = tl.maximum(head - num_queries, 0)
    kind = kv_head // num_kv
    target = cache + slot // BLOCK * block_stride + slot % BLOCK * place_stride
    target += (kind * kind_stride + (kv_head - kind * num_kv) * head_stride)[:, None]
    source = heads + token * token_stride + head[:, None] * HEAD_SIZE
    inverse = _inverse_of(scales, kv_head[:, None], is_cached, num_kv, HAS_SCALES)
    if OVERLAPS:
        gdc_wait()
    element = heads.dtype.element_ty
    # Heads are loaded before their angles, whose address is known only with the position.
    is_pair, dims = (pairs < HALF)[None, :], tl.arange(0, 2 * PADDED)[None, :]
    is_dim = dims < 2 * HALF
    if IS_NEOX:
        near = tl.load(source + pairs[None, :], mask=is_head & is_pair, other=0.0)
        far = tl.load(source + HALF + pairs[None, :], mask=is_head & is_pair, other=0.0)
    else:
        both = tl.load(source + dims, mask=is_head & is_dim, other=0.0)
        near, far = tl.split(tl.reshape(both, [HEADS, PADDED, 2]))
    cos, sin = _angles_of(cos_sin, position, pairs, HALF)
    left, right = near.to(tl.float32), far.to(tl.float32)
    if HAS_NORMS:
        left, right = _normed_halves(
            left, right, query_norm + pairs[None, :], key_norm + pairs[None, :],
            (head < num_queries)[:, None], is_pair, eps, element, HALF,
        )  # fmt: skip
    near = tl.where(is_rotated, (left * cos - right * sin).to(element), near)
    far = tl.where(is_rotated, (right * cos + left * sin).to(element), far)
    if IS_NEOX:
        tl.store(source + pairs[None, :], near, mask=is_rotated & is_pair)
        tl.store(source + HALF + pairs[None, :], far, mask=is_rotated & is_pair)
        near = _stored(near, inverse, cache, HAS_SCALES)
        far = _stored(far, inverse, cache, HAS_SCALES)
        tl.store(target + pairs[None, :], near, mask=is_cached & is_pair)
        tl.store(target + HALF + pairs[None, :], far, mask=is_cached & is_pair)
    else:
        both = tl.reshape(tl.join(near, far), [HEADS, 2 * PADDED])
        tl.store(source + dims, both, mask=is_rotated & is_dim)
        both = _stored(both, inverse, cache, HAS_SCALES)
        tl.store(target + dims, both, mask=is_cached & is_dim)
    if REST > 0:
        _store_rest(
            source, target, is_cached, inverse, cache, HEAD_SIZE, 2 * HALF, REST, HAS_SCALES
        )


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _write_kv_kernel(  # type: ignore[no-untyped-def]
    key, value, cache, slots, scales, key_stride, value_stride, num_kv, block_stride,
    kind_stride, place_stride, head_stride, BLOCK: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr, HEADS: tl.constexpr, HAS_SCALES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (t, g) stores the g-th ``HEADS`` heads of token t's key and value."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, PADDED)[None, :]
    if OVERLAPS:
        gdc_launch_dependents()
    is_value = (head < num_kv) & (dims < HEAD_SIZE)
    slot = tl.load(slots + token)
    target = cache + slot // BLOCK * block_stride + slot % BLOCK * place_stride
    target += head * head_stride + dims
    source = head * HEAD_SIZE + dims
    of_keys = _inverse_of(scales, head, head < num_kv, num_kv, HAS_SCALES)
    of_values = _inverse_of(scales, num_kv + head, head < num_kv, num_kv, HAS_SCALES)
    if OVERLAPS:
        gdc_wait()
    k = tl.load(key + token * key_stride + source, mask=is_value, other=0.0)
    v = tl.load(value + token * value_stride + source, mask=is_value, other=0.0)
    k = _stored(k, of_keys, cache, HAS_SCALES)
    v = _stored(v, of_values, cache, HAS_SCALES)
    tl.store(target, k, mask=is_value)
    tl.store(target + kind_stride, v, mask=is_value)


_rope_and_cache = Launcher(_rope_and_cache_kernel)
_write_kv = Launcher(_write_kv_kernel)


def rope_and_cache(
    heads_TAH: Tensor,
    cos_sin_PR: Tensor,
    positions_T: Tensor,
    kv_cache: Tensor,
    slots_T: Tensor,
    is_neox: bool = True,
    scales_4K: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> None:
    """Rotate query and key heads in place, behind their ``norms`` if any, and store keys and
    values at their slots.

    ``heads`` is a view of the product: queries, then keys, then values, contiguous except for
    the stride of tokens. ``kv_cache`` is [blocks, 2, B, K, H] with any strides except a last
    stride of 1. The first R dims of a head are rotated: by halves (``is_neox``), or by pairs of
    neighbours. ``scales`` quantizes keys and values. Safe under CUDA graph capture.

    Positions and slots are read before the preceding kernel has ended. A kernel between the
    writer of positions and slots and this kernel must first wait for the writer, and then let
    its successor begin, as the embedding does.
    """
    tokens, all_heads, head_size = heads_TAH.shape
    num_kv, half = kv_cache.shape[3], cos_sin_PR.shape[1] // 2
    if norms is not None and not (is_neox and head_size == 2 * half):
        norm_heads(heads_TAH, norms.query, norms.key, num_kv, norms.eps)
        norms = None
    padded = padded_size(half)
    chunk = min(max(1024 // padded, 1), padded_size(all_heads))
    rest = head_size - 2 * half
    args = (
        heads_TAH, cos_sin_PR, positions_T, kv_cache, slots_T,
        cos_sin_PR if scales_4K is None else scales_4K,
        heads_TAH if norms is None else norms.query, heads_TAH if norms is None else norms.key,
        heads_TAH.stride(0), all_heads - 2 * num_kv, num_kv, *kv_cache.stride()[:4],
        0.0 if norms is None else norms.eps,
    )  # fmt: skip
    constants = (
        kv_cache.shape[2], head_size, half, padded,
        padded_size(rest) if rest else 0, chunk, is_neox, scales_4K is not None,
        norms is not None,
    )  # fmt: skip
    _rope_and_cache((tokens, num_tiles(all_heads, chunk)), args, constants)


def write_kv(
    key_TKH: Tensor,
    value_TKH: Tensor,
    kv_cache: Tensor,
    slots_T: Tensor,
    scales_4K: Tensor | None = None,
) -> None:
    """Store each token's key and value at its slot of ``kv_cache`` [blocks, 2, B, K, H].

    Strides, slots and scales as for `rope_and_cache`.
    """
    tokens, num_kv, head_size = key_TKH.shape
    padded = padded_size(head_size)
    chunk = min(max(2048 // padded, 1), padded_size(num_kv))
    args = (
        key_TKH, value_TKH, kv_cache, slots_T, slots_T if scales_4K is None else scales_4K,
        key_TKH.stride(0), value_TKH.stride(0), num_kv, *kv_cache.stride()[:4],
    )  # fmt: skip
    constants = (kv_cache.shape[2], head_size, padded, chunk, scales_4K is not None)
    _write_kv((tokens, num_tiles(num_kv, chunk)), args, constants)
