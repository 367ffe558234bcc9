"""Elementwise operators in the shapes of an 8B Llama."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.bench.kernels.kernel_case import KernelCase, in_turn
from trimaran.kernels.triton import elementwise as triton_elementwise
from trimaran.kernels.triton import norm as triton_norm
from trimaran.kernels.triton import rotary as triton_rotary

ROWS = (1, 64, 256, 1024, 8192)
_HIDDEN, _INNER, _VOCAB = 4096, 14336, 128256
_HEADS, _KV_HEADS, _HEAD_SIZE, _BLOCK = 32, 8, 128, 32
_EPS = 1e-5
_CACHE_BYTES = 200 << 20
"""Least total size of a case's inputs: several times the largest L2."""


def cases(device: torch.device, dtype: torch.dtype) -> list[KernelCase]:
    """Norms, activation, rotation and embedding for one row to a full step."""
    makers = (_norm, _norm_with_residual, _silu_and_mul, _rope_and_cache, _embed)
    return [make(device, dtype, rows) for rows in ROWS for make in makers]


def _copies(num_bytes: int) -> range:
    return range(min(max(2, _CACHE_BYTES // num_bytes), 64))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _norm(device: torch.device, dtype: torch.dtype, rows: int) -> KernelCase:
    num_bytes = 2 * rows * _HIDDEN * dtype.itemsize
    xs = [_random(device, dtype, rows, _HIDDEN) for _ in _copies(num_bytes)]
    weight = _random(device, dtype, _HIDDEN)
    return KernelCase(
        name="rms_norm",
        shape=f"{rows} x {_HIDDEN}",
        dtype=_name(dtype),
        run=in_turn(lambda x: triton_norm.rms_norm(x, weight, _EPS), xs),
        num_bytes=num_bytes + weight.nbytes,
        peer=in_turn(lambda x: F.rms_norm(x, (_HIDDEN,), weight, _EPS), xs),
    )


def _norm_with_residual(device: torch.device, dtype: torch.dtype, rows: int) -> KernelCase:
    num_bytes = 4 * rows * _HIDDEN * dtype.itemsize
    # Adding zeros keeps the residuals constant over calls.
    sets = [
        (torch.zeros(rows, _HIDDEN, dtype=dtype, device=device), residual)
        for residual in (_random(device, dtype, rows, _HIDDEN) for _ in _copies(num_bytes))
    ]
    weight = _random(device, dtype, _HIDDEN)

    def run(inputs: tuple[Tensor, Tensor]) -> Tensor:
        return triton_norm.rms_norm(inputs[0], weight, _EPS, inputs[1])

    def peer(inputs: tuple[Tensor, Tensor]) -> Tensor:
        return F.rms_norm(inputs[1].add_(inputs[0]), (_HIDDEN,), weight, _EPS)

    return KernelCase(
        name="add_rms_norm",
        shape=f"{rows} x {_HIDDEN}",
        dtype=_name(dtype),
        run=in_turn(run, sets),
        num_bytes=num_bytes + weight.nbytes,
        peer=in_turn(peer, sets),
    )


def _silu_and_mul(device: torch.device, dtype: torch.dtype, rows: int) -> KernelCase:
    num_bytes = 3 * rows * _INNER * dtype.itemsize
    xs = [_random(device, dtype, rows, 2 * _INNER) for _ in _copies(num_bytes)]
    return KernelCase(
        name="silu_and_mul",
        shape=f"{rows} x {2 * _INNER}",
        dtype=_name(dtype),
        run=in_turn(triton_elementwise.silu_and_mul, xs),
        num_bytes=num_bytes,
        peer=in_turn(lambda x: F.silu(x[:, :_INNER]) * x[:, _INNER:], xs),
    )


def _rope_and_cache(device: torch.device, dtype: torch.dtype, rows: int) -> KernelCase:
    heads = _HEADS + 2 * _KV_HEADS
    num_read = rows * heads * _HEAD_SIZE
    # Queries and keys are written in place, keys and values to the cache.
    num_written = rows * (_HEADS + 3 * _KV_HEADS) * _HEAD_SIZE
    num_bytes = (num_read + num_written) * dtype.itemsize + rows * _HEAD_SIZE * 4
    sets = [_random(device, dtype, rows, heads, _HEAD_SIZE) for _ in _copies(num_bytes)]
    angles = torch.rand(rows, _HEAD_SIZE // 2, device=device)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.arange(rows, device=device)
    shape = (-(-rows // _BLOCK), 2, _BLOCK, _KV_HEADS, _HEAD_SIZE)
    kv_cache = torch.empty(shape, dtype=dtype, device=device)

    def run(x: Tensor) -> None:
        triton_rotary.rope_and_cache(x, table, positions, kv_cache, positions)

    return KernelCase(
        name="rope_and_cache",
        shape=f"{rows} x {heads} x {_HEAD_SIZE}",
        dtype=_name(dtype),
        run=in_turn(run, sets),
        num_bytes=num_bytes,
    )


def _embed(device: torch.device, dtype: torch.dtype, rows: int) -> KernelCase:
    table = _random(device, dtype, _VOCAB, _HIDDEN)
    ids = [torch.randint(_VOCAB, (rows,), device=device) for _ in range(8)]
    return KernelCase(
        name="embed",
        shape=f"{rows} x {_HIDDEN}",
        dtype=_name(dtype),
        run=in_turn(lambda chosen: triton_elementwise.embed(chosen, table), ids),
        num_bytes=2 * rows * _HIDDEN * dtype.itemsize,
        peer=in_turn(lambda chosen: F.embedding(chosen, table), ids),
    )


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)
