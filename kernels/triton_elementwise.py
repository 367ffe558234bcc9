"""What happens to each token apart, on a GPU: norms, activation, rotation, storing its KV."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

# Shapes: T tokens, D width, E = 2 F gate and up, N heads, K key-value heads, H head size.


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    output,
    x_stride,
    residual_stride,
    width,
    eps,
    PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    is_dim = dims < width
    value = tl.load(x + row * x_stride + dims, mask=is_dim, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual + row * residual_stride + dims
        value += tl.load(place, mask=is_dim, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=is_dim)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    value *= scale * tl.load(weight + dims, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(output + row * width + dims, value.to(output.dtype.element_ty), mask=is_dim)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _silu_kernel(gate_up, output, width, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_dim = dims < width
    source = gate_up + row * 2 * width + dims
    gate = tl.load(source, mask=is_dim, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=is_dim, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * width + dims, value.to(output.dtype.element_ty), mask=is_dim)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rotate_kernel(  # type: ignore[no-untyped-def]
    x, cos_sin, positions, token_stride, num_heads, HALF: tl.constexpr, PADDED: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, 16)
    dims = tl.arange(0, PADDED)
    angles = cos_sin + tl.load(positions + token) * 2 * HALF + dims
    cos = tl.load(angles, mask=dims < HALF, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=dims < HALF, other=0.0)[None, :]
    for first in range(0, num_heads, 16):
        is_value = ((first + heads) < num_heads)[:, None] & (dims < HALF)[None, :]
        place = x + token * token_stride + (first + heads)[:, None] * 2 * HALF + dims[None, :]
        left = tl.load(place, mask=is_value, other=0.0).to(tl.float32)
        right = tl.load(place + HALF, mask=is_value, other=0.0).to(tl.float32)
        kind = x.dtype.element_ty
        tl.store(place, (left * cos - right * sin).to(kind), mask=is_value)
        tl.store(place + HALF, (right * cos + left * sin).to(kind), mask=is_value)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _write_kv_kernel(  # type: ignore[no-untyped-def]
    key,
    value,
    cache,
    slots,
    key_stride,
    value_stride,
    block_stride,
    width,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    is_dim = dims < width
    slot = tl.load(slots + token)
    place = cache + slot // BLOCK * block_stride + slot % BLOCK * width + dims
    k = tl.load(key + token * key_stride + dims, mask=is_dim)
    v = tl.load(value + token * value_stride + dims, mask=is_dim)
    tl.store(place, k, mask=is_dim)
    tl.store(place + BLOCK * width, v, mask=is_dim)


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None
) -> Tensor:
    """Normalise ``x``, or ``residual`` after adding ``x`` to it, in one pass."""
    rows, width = x_TD.shape
    output = torch.empty((rows, width), dtype=x_TD.dtype, device=x_TD.device)
    residual = x_TD if residual_TD is None else residual_TD
    _rms_norm_kernel[(rows,)](
        x_TD, residual, weight_D, output, x_TD.stride(0), residual.stride(0), width, eps,
        PADDED=triton.next_power_of_2(width), HAS_RESIDUAL=residual_TD is not None,
    )  # fmt: skip
    return output


def silu_and_mul(gate_up_TE: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of a contiguous input's last dim."""
    rows, width = gate_up_TE.shape[0], gate_up_TE.shape[1] // 2
    output = torch.empty((rows, width), dtype=gate_up_TE.dtype, device=gate_up_TE.device)
    grid = (rows, triton.cdiv(width, 1024))
    _silu_kernel[grid](gate_up_TE, output, width, TILE=1024)
    return output


def rotate(x_TNH: Tensor, cos_sin_PH: Tensor, positions_T: Tensor) -> None:
    """Rotate the halves of each head by its position's angles, in place."""
    tokens, heads, head_size = x_TNH.shape
    half = head_size // 2
    _rotate_kernel[(tokens,)](
        x_TNH, cos_sin_PH, positions_T, x_TNH.stride(0), heads, HALF=half,
        PADDED=triton.next_power_of_2(half),
    )  # fmt: skip


def write_kv(key_TKH: Tensor, value_TKH: Tensor, kv_cache: Tensor, slots_T: Tensor) -> None:
    """Store each token's key and value at its slot of ``kv_cache`` [blocks, 2, B, K, H]."""
    tokens, heads, head_size = key_TKH.shape
    width = heads * head_size
    _write_kv_kernel[(tokens,)](
        key_TKH, value_TKH, kv_cache, slots_T, key_TKH.stride(0), value_TKH.stride(0),
        kv_cache.stride(0), width, BLOCK=kv_cache.shape[2],
        PADDED=triton.next_power_of_2(width),
    )  # fmt: skip
