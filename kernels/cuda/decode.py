"""Attention of decodes on Hopper by our CUDA C++ kernels: supported inputs, and the launch."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.cuda.build import load_cubin
from trimaran.kernels.cuda.driver import CudaKernel, CudaModule, TensorMap, tensor_map
from trimaran.kernels.cuda.hopper_gemm import Quantization
from trimaran.kernels.cuda.kv_cache_partitions import partitions_of_heads
from trimaran.kernels.cuda.l2_partitions import L2Partitions
from trimaran.kernels.triton.attention.work_items import WorkPlan, plan_work

# Shapes: S sequences, N query heads, K key-value heads, H head size, B tokens of a block.

_SOURCE = "attention_decode"
_PANEL_BYTES = 128
_FEW = 8
_UNIT = 32
_THREADS = 160
_PROGRAMS_PER_SM = 2
_SHARED_BYTES = {64: 109_344, 96: 111_264, 128: 113_232}
_SHARED_BYTES_OF_BYTES = {64: 97_288, 128: 101_064}
# The same with columns for several tokens.
_SHARED_BYTES_OF_MANY = {64: 107_296, 96: 111_264, 128: 115_280}
_SHARED_BYTES_OF_MANY_BYTES = {64: 91_144, 128: 99_016}
DTYPES = (torch.float16, torch.bfloat16)
_STORED = {torch.float8_e4m3fn: 1, torch.int8: 2}
"""DECODE_STORED of quantized caches. FP8 and INT8 become float16 in registers, which holds them
exactly. There a query is multiplied by a power of two that brings its largest number to
float16's range."""
_BLOCKS = (8, 16, 32, 64)
_MAX_GROUP = 8
_COLUMNS = 16
"""Query heads of one or more tokens that a split serves, in steps with drafts."""
_MAX_ROTATED_GROUP = 4


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("output", ctypes.c_void_p), ("query", ctypes.c_void_p), ("tables", ctypes.c_void_p),
        ("items", ctypes.c_void_p), ("splits", ctypes.c_void_p),
        ("counters", ctypes.c_void_p), ("partial", ctypes.c_void_p),
        ("log_sums", ctypes.c_void_p),
        ("query_stride", ctypes.c_longlong), ("output_stride", ctypes.c_longlong),
        ("table_stride", ctypes.c_longlong), ("scale_log2", ctypes.c_float),
        ("group", ctypes.c_int), ("kv_heads", ctypes.c_int), ("block_shift", ctypes.c_int),
        ("reads_ahead", ctypes.c_int), ("halves_per_block", ctypes.c_int),
        ("angles", ctypes.c_void_p), ("cache", ctypes.c_void_p),
        ("cache_strides", ctypes.c_longlong * 4), ("kv_scales", ctypes.c_void_p),
        ("page_partitions", ctypes.c_void_p), ("readers", ctypes.c_void_p),
        ("first_page", ctypes.c_longlong), ("num_pages", ctypes.c_int),
        ("partition_mask", ctypes.c_uint), ("processor_partitions", ctypes.c_uint * 8),
        ("shares", ctypes.c_void_p), ("quantization", Quantization),
        ("tree_masks", ctypes.c_void_p),
    )  # fmt: skip


class QuantizedHeads(NamedTuple):
    """Where attention puts results in FP8."""

    values: Tensor
    """e4m3 [S, N, H], contiguous, heads of 128."""

    quantization: Quantization
    """Its scales are [N, P]: each head has its own."""


def refusal(query_SNH: Tensor, kv_cache: Tensor, spec: AttentionSpec) -> str | None:
    """Why these kernels cannot serve this attention; None if they can."""
    head_size = query_SNH.shape[2]
    group = query_SNH.shape[1] // kv_cache.shape[3]
    is_quantized = kv_cache.dtype in _STORED and spec.kv_scales is not None
    if query_SNH.dtype not in DTYPES or not (is_quantized or kv_cache.dtype == query_SNH.dtype):
        return f"queries of {query_SNH.dtype} and a cache of {kv_cache.dtype}"
    if head_size not in (_SHARED_BYTES_OF_BYTES if is_quantized else _SHARED_BYTES):
        return f"heads of {head_size}"
    if kv_cache.shape[2] not in _BLOCKS:
        return f"blocks of {kv_cache.shape[2]} tokens"
    if spec.window or spec.num_sinks or spec.soft_cap:
        return "a window, sinks or a soft cap"
    if spec.position_bias is not None:
        return "a bias of positions"
    if spec.sink_logits is not None:
        return "a score of no key"
    if group > _MAX_GROUP:
        return f"{group} query heads to a key-value head"
    if kv_cache.stride(4) != 1 or query_SNH.stride()[1:] != (head_size, 1):
        return "heads that are not dense"
    strides = kv_cache.stride()[:4]
    sizes = [*(kv_cache.element_size() * each for each in strides), 2 * query_SNH.stride(0)]
    if any(size % 16 for size in sizes):
        return f"strides of {sizes} bytes, not all multiples of 16"
    if strides[0] % strides[1]:
        return f"blocks {strides[0]} elements apart, whose halves are {strides[1]} apart"
    if kv_cache.data_ptr() % 16 or query_SNH.data_ptr() % 16:
        return "addresses that are no multiples of 16"
    return None


def rotates(query_SNH: Tensor, kv_cache: Tensor, cos_sin_PH: Tensor) -> bool:
    """Whether `decode` supports these angles, for inputs without a `refusal`."""
    _, num_heads, head_size = query_SNH.shape
    is_whole = cos_sin_PH.shape[1] == head_size and cos_sin_PH.dtype == torch.float32
    is_dense = cos_sin_PH.is_contiguous() and cos_sin_PH.data_ptr() % 16 == 0
    return is_whole and is_dense and num_heads <= _MAX_ROTATED_GROUP * kv_cache.shape[3]


def decode(
    query_SNH: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    output: Tensor | QuantizedHeads,
    *,
    is_fixed: bool = False,
    cos_sin_PH: Tensor | None = None,
    shares_reads: bool = False,
) -> None:
    """Attention of the first S sequences of a step, one query each, into ``output``.

    Supports inputs without a `refusal`, and ``output`` [S, N, H] contiguous. With ``is_fixed``
    a sequence's result does not depend on other sequences. The launch depends on the number of
    sequences alone: safe under CUDA graph capture, and a replay may have any lengths that fit
    the block table.

    ``cos_sin`` requires that `rotates` allows the rotation. In memory the K keys and the K
    values of the same token, the last token of its sequence, then follow the queries. The
    kernel rotates queries and keys as `Ops.rope_and_cache` rotates whole heads by halves, and
    stores keys and values at their slots, quantized if the cache is.

    With ``shares_reads`` in a step that ``shares_rows``, queries of one sequence read its keys
    together, as many as fit the columns. With ``is_fixed`` each has its result without others.
    """
    num_heads, head_size = query_SNH.shape[1:]
    num_kv_heads = kv_cache.shape[3]
    output_SNH = output if isinstance(output, Tensor) else output.values
    shares = shares_reads and metadata.shares_rows and cos_sin_PH is None
    plan, reads_ahead = _plan_of(
        query_SNH, kv_cache, metadata, is_fixed=is_fixed, shares=shares
    )
    tables = metadata.block_tables
    arguments = _Arguments(
        output_SNH.data_ptr(), query_SNH.data_ptr(), tables.data_ptr(),
        plan.items.data_ptr(), plan.splits.data_ptr(), plan.counters.data_ptr(),
        plan.partial.data_ptr(), plan.log_sums.data_ptr(), query_SNH.stride(0),
        output_SNH.stride(0), tables.stride(0), spec.scale * math.log2(math.e),
        num_heads // num_kv_heads, num_kv_heads, kv_cache.shape[2].bit_length() - 1,
        reads_ahead, kv_cache.stride(0) // kv_cache.stride(1),
        None if cos_sin_PH is None else cos_sin_PH.data_ptr(), kv_cache.data_ptr(),
        kv_cache.stride()[:4],
        None if spec.kv_scales is None else spec.kv_scales.data_ptr(),
    )  # fmt: skip
    if isinstance(output, QuantizedHeads):
        arguments.quantization = output.quantization
    for name, tensor in (("shares", plan.shares), ("tree_masks", metadata.tree_masks)):
        setattr(arguments, name, None if tensor is None else tensor.data_ptr())
    if (partitions := partitions_of_heads(kv_cache)) is not None:
        _read_by_partitions(arguments, plan, partitions)
    kernel = _kernel(
        query_SNH.device, query_SNH.dtype, head_size, kv_cache.dtype,
        shares=plan.shares is not None, has_trees=metadata.tree_masks is not None,
    )  # fmt: skip
    stream = torch.cuda.current_stream(query_SNH.device).cuda_stream
    kernel.launch(
        plan.num_programs * num_kv_heads, stream, *_cache_maps(kv_cache), arguments
    )  # fmt: skip


def _plan_of(
    query_SNH: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    is_fixed: bool,
    shares: bool,
) -> tuple[WorkPlan, bool]:
    """The step's plan, and whether a launch may read keys ahead of the preceding kernel."""
    num_sequences, num_heads, head_size = query_SNH.shape
    num_kv_heads, device = kv_cache.shape[3], query_SNH.device
    key = ("cuda_decode", num_heads, num_kv_heads, is_fixed, shares)
    found: WorkPlan | None = metadata.plans.get(key)
    if found is not None:
        # The preceding kernel stores keys of the step. The plan of shared reads tells which,
        # unless drafts follow a prompt's chunk, which is no decode.
        is_known = shares and metadata.num_decodes == metadata.seq_lens.shape[0]
        return found, is_known or not metadata.shares_rows
    heads = (num_heads, num_kv_heads, head_size)
    num_programs = _num_processors(device) * _PROGRAMS_PER_SM
    unit = max(_UNIT, kv_cache.shape[2])
    max_queries = _COLUMNS * num_kv_heads // num_heads if shares else 1
    plan = plan_work(
        metadata, heads, num_sequences, num_programs, unit, is_fixed=is_fixed,
        max_queries=max_queries,
    )  # fmt: skip
    metadata.plans[key] = plan
    return plan, False


def _read_by_partitions(
    arguments: _Arguments, plan: WorkPlan, partitions: L2Partitions
) -> None:
    """Let thread blocks read the heads of their own L2 partition, in as many layers as the
    plan has counters for.
    """
    if plan.num_launches < len(plan.readers):
        arguments.page_partitions = partitions.page_bits.data_ptr()
        arguments.readers = plan.readers[plan.num_launches].data_ptr()
        arguments.first_page = partitions.first_page
        arguments.num_pages = 32 * len(partitions.page_bits)
        arguments.partition_mask = partitions.mask
        arguments.processor_partitions = partitions.processor_partitions
        plan.num_launches += 1


def load(device: torch.device, dtype: torch.dtype) -> None:
    """Compile and load the kernels over caches of ``dtype``, or raise
    `KernelsUnavailableError` with the cause.
    """
    torch.empty(0, device=device)  # opens the device's context
    for head_size in _SHARED_BYTES:
        _kernel(device, dtype, head_size, dtype, shares=False)


@lru_cache
def compile_decode(
    cache_dtype: torch.dtype, *, shares: bool = False, has_trees: bool = False
) -> bytes:
    """The kernels over caches of one of `DTYPES`, FP8 or INT8; those of steps with drafts if
    queries may share reads, and those with masks if drafts are trees."""
    columns = _COLUMNS if shares else _MAX_GROUP
    stored = _STORED.get(cache_dtype, 0)
    defines = (
        f"DECODE_STORED={stored}", f"DECODE_COLUMNS={columns}",
        f"DECODE_TREES={int(has_trees)}",
    )  # fmt: skip
    return load_cubin(_SOURCE, "sm_90a", defines)


@lru_cache
def _module(cache_dtype: torch.dtype, *, shares: bool, has_trees: bool) -> CudaModule:
    return CudaModule(compile_decode(cache_dtype, shares=shares, has_trees=has_trees))


@lru_cache
def _kernel(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    cache_dtype: torch.dtype,
    *,
    shares: bool,
    has_trees: bool = False,
) -> CudaKernel:
    name = f"decode_{str(dtype).removeprefix('torch.')}_{head_size}"
    if cache_dtype in _STORED:
        sizes = _SHARED_BYTES_OF_MANY_BYTES if shares else _SHARED_BYTES_OF_BYTES
    else:
        sizes = _SHARED_BYTES_OF_MANY if shares else _SHARED_BYTES
    return _module(cache_dtype, shares=shares, has_trees=has_trees).kernel(
        name, device, num_threads=_THREADS, shared_bytes=sizes[head_size], overlaps=True
    )  # fmt: skip


@lru_cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_maps: dict[tuple[object, ...], tuple[TensorMap, TensorMap]] = {}
_MAX_MAPS = 4096


def _cache_maps(kv_cache: Tensor) -> tuple[TensorMap, TensorMap]:
    """Tensor maps of a layer's cache, for one head's block and for a few tokens. Cached,
    since caches live long.
    """
    key = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride(), kv_cache.dtype)
    found = _maps.get(key)
    if found is None:
        if len(_maps) >= _MAX_MAPS:
            _maps.clear()
        # A block's keys and its values are halves at one constant stride.
        blocks, _, size, heads, width = kv_cache.shape
        block_stride, half_stride, *strides = kv_cache.stride()
        num_halves = (blocks - 1) * (block_stride // half_stride) + 2
        panel = math.gcd(width, _PANEL_BYTES // kv_cache.element_size())
        panels = width // panel
        halves = kv_cache.as_strided(
            (num_halves, heads, size, panels, panel),
            (half_stride, strides[1], strides[0], panel, 1),
        )
        dims = (4, 3, 2, 1, 0)
        # L2 promotion costs 5 % where every byte is read once.
        found = _maps[key] = (
            tensor_map(halves, dims, (panel, panels, size, 1, 1), promotes=False),
            tensor_map(halves, dims, (panel, panels, _FEW, 1, 1), promotes=False),
        )
    return found
