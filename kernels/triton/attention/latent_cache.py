"""Rotation of latent attention's queries and shared key, and storing latent vectors."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.triton.launch import Launcher, num_tiles, padded_size

# Shapes: T tokens, N query heads, H dims of a query head, L dims of a latent vector, R
# rotated dims, P positions, B tokens of a block.


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def rotate(  # type: ignore[no-untyped-def]
    source, target, cos, sin, mask, HALF: tl.constexpr, PADDED: tl.constexpr,
    IS_NEOX: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate rows of 2 HALF values in place, and store a copy at target."""
    pairs, dims = tl.arange(0, PADDED)[None, :], tl.arange(0, 2 * PADDED)[None, :]
    is_pair, is_dim = mask & (pairs < HALF), mask & (dims < 2 * HALF)
    element = source.dtype.element_ty
    if IS_NEOX:
        near = tl.load(source + pairs, mask=is_pair, other=0.0).to(tl.float32)
        far = tl.load(source + HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)
    else:
        both = tl.load(source + dims, mask=is_dim, other=0.0).to(tl.float32)
        near, far = tl.split(tl.reshape(both, [HEADS, PADDED, 2]))
    left, right = (near * cos - far * sin).to(element), (far * cos + near * sin).to(element)
    if IS_NEOX:
        tl.store(source + pairs, left, mask=is_pair)
        tl.store(source + HALF + pairs, right, mask=is_pair)
        tl.store(target + pairs, left, mask=is_pair)
        tl.store(target + HALF + pairs, right, mask=is_pair)
    else:
        both = tl.reshape(tl.join(left, right), [HEADS, 2 * PADDED])
        tl.store(source + dims, both, mask=is_dim)
        tl.store(target + dims, both, mask=is_dim)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rope_and_cache_latent_kernel(  # type: ignore[no-untyped-def]
    query, latent, key, cos_sin, positions, cache, slots, query_stride, head_stride,
    latent_stride, key_stride, num_heads, block_stride, place_stride, BLOCK: tl.constexpr,
    OFFSET: tl.constexpr, LATENT: tl.constexpr, LATENT_PADDED: tl.constexpr,
    HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, IS_NEOX: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (t, 0) handles the latent vector and the key of token t; program (t, g + 1)
    the g-th ``HEADS`` query heads.
    """
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if OVERLAPS:
        gdc_launch_dependents()
    # Positions and slots are complete before the step's first layer, see the launch.
    position, slot = tl.load(positions + token), tl.load(slots + token)
    pairs = tl.arange(0, PADDED)
    angles = cos_sin + position.to(tl.int64) * 2 * HALF + pairs
    cos = tl.load(angles, mask=pairs < HALF, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=pairs < HALF, other=0.0)[None, :]
    target = cache + slot // BLOCK * block_stride + slot % BLOCK * place_stride
    if OVERLAPS:
        gdc_wait()
    if group == 0:
        dims, one = tl.arange(0, LATENT_PADDED), tl.arange(0, 1)[:, None]
        is_dim = dims < LATENT
        vector = tl.load(latent + token * latent_stride + dims, mask=is_dim)
        tl.store(target + dims, vector, mask=is_dim)
        rotate(key + token * key_stride + one, target + LATENT + one, cos, sin, one < 1,
              HALF, PADDED, IS_NEOX, 1)  # fmt: skip
    else:
        heads = ((group - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        source = query + token * query_stride + heads * head_stride + OFFSET
        rotate(source, source, cos, sin, heads < num_heads, HALF, PADDED, IS_NEOX, HEADS)


_rope_and_cache_latent = Launcher(_rope_and_cache_latent_kernel)


def rope_and_cache_latent(
    query_TNH: Tensor,
    latent_TL: Tensor,
    key_TR: Tensor,
    cos_sin_PR: Tensor,
    positions_T: Tensor,
    kv_cache: Tensor,
    slots_T: Tensor,
    is_neox: bool = True,
) -> None:
    """Rotate the last R dims of each query head, and the key, in place; store the latent
    vector and the key behind it at their slot; see `Ops.rope_and_cache_latent`.

    Last dims are contiguous, other dims have any strides. Safe under CUDA graph capture.
    Positions and slots are read before the preceding kernel has ended, as by
    `triton_rotary.rope_and_cache`.
    """
    tokens, heads, head_size = query_TNH.shape
    latent, rotated = latent_TL.shape[1], key_TR.shape[1]
    padded = padded_size(rotated // 2)
    chunk = min(max(1024 // padded, 1), padded_size(heads))
    args = (
        query_TNH, latent_TL, key_TR, cos_sin_PR, positions_T, kv_cache, slots_T,
        *query_TNH.stride()[:2], latent_TL.stride(0), key_TR.stride(0), heads,
        kv_cache.stride(0), kv_cache.stride(2),
    )  # fmt: skip
    constants = (
        kv_cache.shape[2], head_size - rotated, latent, padded_size(latent), rotated // 2,
        padded, chunk, is_neox,
    )  # fmt: skip
    _rope_and_cache_latent((tokens, 1 + num_tiles(heads, chunk)), args, constants)
