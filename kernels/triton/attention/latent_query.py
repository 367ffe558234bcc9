"""Queries for latent vectors of a step of decodes, whose own vectors are stored beside."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.attention import LatentRows, Rotation
from trimaran.kernels.triton.attention.latent_cache import rotate
from trimaran.kernels.triton.heads import HeadTile, multiply_head, request_matrix
from trimaran.kernels.triton.launch import Launcher, num_tiles, padded_size

# Shapes: T tokens, N query heads, H dims of a query head, P of them that are not rotated, L
# dims of a latent vector, R rotated dims, B tokens of a block.


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _store_vector(  # type: ignore[no-untyped-def]
    latent, norm, target, eps, LATENT: tl.constexpr, LATENT_PADDED: tl.constexpr,
):  # fmt: skip
    """Normalise a latent vector in float32 and store it."""
    dims = tl.arange(0, LATENT_PADDED)
    is_dim = dims < LATENT
    value = tl.load(latent + dims, mask=is_dim, other=0.0).to(tl.float32)
    scale = tl.load(norm + dims, mask=is_dim, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / LATENT + eps) * scale
    tl.store(target + dims, value.to(target.dtype.element_ty), mask=is_dim)


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator,unused-ignore]
def _latent_query_kernel(  # type: ignore[no-untyped-def]
    query, latent, key, norm, weight, cos_sin, positions, cache, slots, output, query_stride,
    head_stride, latent_stride, key_stride, weight_head_stride, weight_row_stride,
    weight_column_stride, block_stride, place_stride, num_heads, num_tokens, eps,
    WIDTH: tl.constexpr, LATENT: tl.constexpr, LATENT_PADDED: tl.constexpr, HALF: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr, IS_NEOX: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, LINES: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): i counts tiles of rows, and heads fastest; j tiles of a head's product.
    The next j rotates dims of these rows and heads. With each further j every i stores a
    token's latent vector and rotated key.
    """
    TILES: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    head, part = tl.program_id(0) % num_heads, tl.program_id(1)
    rows = tl.program_id(0) // num_heads * ROWS + tl.arange(0, ROWS)
    is_row = (rows < num_tokens)[:, None]
    columns, pairs = part * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PADDED)[None, :]
    matrix = weight + head.to(tl.int64) * weight_head_stride
    source = query + rows.to(tl.int64)[:, None] * query_stride + head * head_stride
    target = output + (rows.to(tl.int64)[:, None] * num_heads + head) * (LATENT + 2 * HALF)
    if OVERLAPS:
        gdc_launch_dependents()
        if part < TILES:
            request_matrix(matrix, columns, weight_row_stride, LATENT, LINES)
        gdc_wait()
    if part < TILES:
        multiply_head(
            source, matrix, target, is_row, columns, weight_row_stride, weight_column_stride,
            WIDTH, LATENT, ROWS, COLUMNS, STEP, PRECISION,
        )  # fmt: skip
    elif part == TILES:
        position = tl.load(positions + rows, mask=rows < num_tokens, other=0)[:, None]
        angles = cos_sin + position.to(tl.int64) * 2 * HALF + pairs
        cos = tl.load(angles, mask=pairs < HALF, other=0.0)
        sin = tl.load(angles + HALF, mask=pairs < HALF, other=0.0)
        rotate(source + WIDTH, target + LATENT, cos, sin, is_row, HALF, PADDED, IS_NEOX, ROWS)
    else:
        token = (part - TILES - 1) * tl.num_programs(0) + tl.program_id(0)
        if token < num_tokens:
            position, slot = tl.load(positions + token), tl.load(slots + token)
            angles = cos_sin + position.to(tl.int64) * 2 * HALF + pairs
            cos = tl.load(angles, mask=pairs < HALF, other=0.0)
            sin = tl.load(angles + HALF, mask=pairs < HALF, other=0.0)
            place = cache + slot // BLOCK * block_stride + slot % BLOCK * place_stride
            vector = latent + token.to(tl.int64) * latent_stride
            _store_vector(vector, norm, place, eps, LATENT, LATENT_PADDED)
            one = tl.arange(0, 1)[:, None]
            rotate(
                key + token.to(tl.int64) * key_stride + one, place + LATENT + one, cos, sin,
                one < 1, HALF, PADDED, IS_NEOX, 1,
            )  # fmt: skip


_latent_query = Launcher(_latent_query_kernel)


def query_latents(
    rows: LatentRows,
    rotation: Rotation,
    kv_cache: Tensor,
    slots_T: Tensor,
    key_up_NLP: Tensor,
) -> Tensor:
    """Each head's query for latent vectors [T, N, L + R]: its first P dims times ``key_up``,
    and its other dims rotated. The normalised latent vector and the rotated key behind it go
    to the token's slot.

    ``query`` and ``key`` of ``rows`` are overwritten. Last dims are contiguous, other dims
    have any strides. Safe under CUDA graph capture.
    """
    tokens, heads, _ = rows.query.shape
    latent, width = key_up_NLP.shape[1:]
    rotated = rows.key.shape[1]
    output = torch.empty(
        (tokens, heads, latent + rotated), dtype=rows.query.dtype, device=rows.query.device
    )
    args = (
        rows.query, rows.latent, rows.key, rows.norm, key_up_NLP, rotation.cos_sin,
        rotation.positions, kv_cache, slots_T, output, *rows.query.stride()[:2],
        rows.latent.stride(0), rows.key.stride(0), *key_up_NLP.stride(), kv_cache.stride(0),
        kv_cache.stride(2), heads, tokens, rows.eps,
    )  # fmt: skip
    tile = HeadTile.of(tokens, key_up_NLP)
    constants = (
        width, latent, padded_size(latent), rotated // 2, padded_size(rotated // 2),
        kv_cache.shape[2], rotation.is_neox, *tile,
        "ieee" if output.dtype is torch.float32 else "tf32",
    )  # fmt: skip
    programs = num_tiles(tokens, tile.rows) * heads
    num_parts = num_tiles(latent, tile.columns) + 1 + num_tiles(tokens, programs)
    _latent_query((programs, num_parts), args, constants)
    return output
