"""Attention of prompts on Hopper by our CUDA C++ kernels: supported inputs, and the launch."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

import torch
from torch import Tensor

from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.cuda.build import load_cubin
from trimaran.kernels.cuda.driver import CudaKernel, CudaModule, TensorMap, tensor_map

# Shapes: T tokens, N query heads, K key-value heads, H head size, B tokens of a block.

_ROWS = 128
_PANEL = 64
_GROUP = 8
_THREADS = 384
_PLANNERS = 1024
_SHARED_BYTES = {64: 165_888, 128: 198_400}
HEAD_SIZES = tuple(_SHARED_BYTES)
DTYPES = (torch.float16, torch.bfloat16)
_BLOCKS = (8, 16, 32, 64, 128)
_TILE_INTS = 4


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("output", ctypes.c_void_p), ("tables", ctypes.c_void_p), ("tiles", ctypes.c_void_p),
        ("output_stride", ctypes.c_longlong), ("table_stride", ctypes.c_longlong),
        ("scale_log2", ctypes.c_float), ("group", ctypes.c_int), ("kv_heads", ctypes.c_int),
        ("block_shift", ctypes.c_int), ("window", ctypes.c_int), ("num_sinks", ctypes.c_int),
        ("pieces", ctypes.c_int * 3),
    )  # fmt: skip


class _PlanArguments(ctypes.Structure):
    _fields_ = (
        ("query_start_loc", ctypes.c_void_p), ("seq_lens", ctypes.c_void_p),
        ("rows", ctypes.c_void_p), ("tiles", ctypes.c_void_p),
        ("num_sequences", ctypes.c_int), ("step", ctypes.c_int),
    )  # fmt: skip


def refusal(query_TNH: Tensor, kv_cache: Tensor, spec: AttentionSpec) -> str | None:
    """Why these kernels cannot serve this attention; None if they can."""
    head_size = query_TNH.shape[2]
    group = query_TNH.shape[1] // kv_cache.shape[3]
    if query_TNH.dtype not in DTYPES or kv_cache.dtype != query_TNH.dtype:
        return f"queries of {query_TNH.dtype} and a cache of {kv_cache.dtype}"
    if head_size not in _SHARED_BYTES:
        return f"heads of {head_size}"
    if kv_cache.shape[2] not in _BLOCKS:
        return f"blocks of {kv_cache.shape[2]} tokens"
    if spec.soft_cap:
        return "a soft cap"
    if spec.position_bias is not None:
        return "a bias of positions"
    if spec.sink_logits is not None:
        return "a score of no key"
    if group > _ROWS:
        return f"{group} query heads to a key-value head"
    strides = (*kv_cache.stride()[:4], query_TNH.stride(0))
    if kv_cache.stride(4) != 1 or query_TNH.stride()[1:] != (head_size, 1):
        return "heads that are not dense"
    if any(stride % 8 for stride in strides):
        return f"strides {strides} that are no multiples of 8"
    if (query_TNH.data_ptr() | kv_cache.data_ptr()) % 16:
        return "addresses that are no multiples of 16"
    return None


def prefill(
    query_TNH: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    output_TNH: Tensor,
) -> None:
    """Attention of all sequences after the leading decodes, written to their tokens'
    ``output``.

    Supports inputs without a `refusal`, and ``output`` [T, N, H] contiguous. ``kv_cache``
    [blocks, 2, B, K, H] may have any strides. A sequence's result does not depend on other
    sequences. All layers of a step share the plan that the first layer makes.
    """
    num_tokens, num_heads, head_size = query_TNH.shape
    num_kv_heads = kv_cache.shape[3]
    group = num_heads // num_kv_heads
    device = query_TNH.device
    stream = torch.cuda.current_stream(device).cuda_stream
    tables = metadata.block_tables
    if metadata.rows is None:
        tables = tables[metadata.num_decodes :]
    plan_kernel = _plan_kernel(device, query_TNH.dtype, head_size)
    tiles = _plan(metadata, num_tokens, _ROWS // group, stream, plan_kernel)
    arguments = _Arguments(
        output_TNH.data_ptr(), tables.data_ptr(), tiles.data_ptr(),
        output_TNH.stride(0), tables.stride(0), spec.scale * math.log2(math.e), group,
        num_kv_heads, kv_cache.shape[2].bit_length() - 1, spec.window, spec.num_sinks,
    )  # fmt: skip
    queries = _map(query_TNH, (2, 1, 0), (_PANEL, group, _ROWS // group))
    cache, arguments.pieces = _cache_map(kv_cache)
    kernel = _kernel(device, query_TNH.dtype, head_size, spec.window > 0)
    num_blocks = min(_num_processors(device), (tiles.shape[0] - 1) * num_kv_heads)
    kernel.launch(num_blocks, stream, queries, cache, arguments)


_cache_maps: dict[tuple[object, ...], tuple[TensorMap, tuple[int, ...]]] = {}


def _cache_map(kv_cache: Tensor) -> tuple[TensorMap, tuple[int, ...]]:
    """A tensor map of `_pieces`, for copies of one piece, and the numbers of pieces from
    block to block, from keys to values and from head to head. Cached, since caches live
    long.
    """
    key = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride(), kv_cache.dtype)
    found = _cache_maps.get(key)
    if found is None:
        if len(_cache_maps) >= _MAX_MAPS:
            _cache_maps.clear()
        pieces = _pieces(kv_cache)
        copied = tensor_map(pieces, (4, 3, 2, 1, 0), (*reversed(pieces.shape[1:]), 1))
        counts = tuple(kv_cache.stride(dim) // pieces.stride(0) for dim in (0, 1, 3))
        found = _cache_maps[key] = copied, counts
    return found


def _pieces(kv_cache: Tensor) -> Tensor:
    """[pieces, B / 8, H / 64, 8, 64]: every address at which a head's keys or values of a
    block may begin, by groups of 8 tokens, panels of 64 dims and tokens.
    """
    blocks, halves, size, heads, width = kv_cache.shape
    block, half, token, head, _ = kv_cache.stride()
    step = math.gcd(block, half, head)
    last = (blocks - 1) * block + (halves - 1) * half + (heads - 1) * head
    return kv_cache.as_strided(
        (last // step + 1, size // _GROUP, width // _PANEL, _GROUP, _PANEL),
        (step, _GROUP * token, _PANEL, token, 1),
    )


def _plan(
    metadata: AttentionMetadata, num_tokens: int, step: int, stream: int, kernel: CudaKernel
) -> Tensor:
    """The tiles of a step, each of ``step`` queries, in the layout of the kernel's plan."""
    first = metadata.num_decodes
    key = ("cuda_prefill", first, step)
    plan: Tensor | None = metadata.plans.get(key)
    if plan is not None:
        return plan
    num_sequences = metadata.seq_lens.shape[0] - first
    most = -(-(num_tokens - first) // step) + num_sequences
    device = metadata.seq_lens.device
    plan = torch.empty((1 + most, _TILE_INTS), dtype=torch.int32, device=device)
    rows = metadata.rows
    arguments = _PlanArguments(
        metadata.query_start_loc[first:].data_ptr(), metadata.seq_lens[first:].data_ptr(),
        None if rows is None else rows[first:].data_ptr(), plan.data_ptr(), num_sequences,
        step,
    )  # fmt: skip
    kernel.launch(1, stream, arguments)
    metadata.plans[key] = plan
    return plan


def load(device: torch.device, dtype: torch.dtype) -> None:
    """Compile and load the kernels, or raise `KernelsUnavailableError` with the cause."""
    torch.empty(0, device=device)  # opens the device's context
    for head_size in HEAD_SIZES:
        _kernel(device, dtype, head_size, False)


@lru_cache
def compile_prefill(dtype: torch.dtype, head_size: int, has_window: bool = False) -> bytes:
    """The kernels for one dtype of `DTYPES` and head size."""
    defines = [f"PREFILL_HEAD={head_size}", f"PREFILL_BF16={int(dtype == torch.bfloat16)}"]
    if has_window:
        # Separate kernels: with the code for windows, the loop without windows is a tenth
        # slower.
        defines.append("WINDOW")
    return load_cubin("attention_prefill", "sm_90a", tuple(defines))


@lru_cache
def _module(dtype: torch.dtype, head_size: int, has_window: bool) -> CudaModule:
    return CudaModule(compile_prefill(dtype, head_size, has_window))


@lru_cache
def _kernel(
    device: torch.device, dtype: torch.dtype, head_size: int, has_window: bool
) -> CudaKernel:
    return _module(dtype, head_size, has_window).kernel(
        "attend", device, num_threads=_THREADS, shared_bytes=_SHARED_BYTES[head_size]
    )


@lru_cache
def _plan_kernel(device: torch.device, dtype: torch.dtype, head_size: int) -> CudaKernel:
    module = _module(dtype, head_size, False)
    return module.kernel("plan_prefill", device, num_threads=_PLANNERS)


@lru_cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_maps: dict[tuple[object, ...], TensorMap] = {}
_MAX_MAPS = 8192


def _map(tensor: Tensor, dims: tuple[int, ...], box: tuple[int, ...]) -> TensorMap:
    """`tensor_map`, cached by address and strides: the allocator reuses addresses."""
    key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, box)
    found = _maps.get(key)
    if found is None:
        if len(_maps) >= _MAX_MAPS:
            _maps.clear()
        found = _maps[key] = tensor_map(tensor, dims, box)
    return found
