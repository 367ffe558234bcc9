"""The choice of kernels for the attention of decodes on a GPU."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from trimaran.kernels.attention import AttentionMetadata, AttentionSpec, HeadNorms
from trimaran.kernels.build import KernelsUnavailableError
from trimaran.kernels.cuda import decode as cuda_decode
from trimaran.kernels.cuda.hopper_gemm import Quantization
from trimaran.kernels.quantized import FP8, GROUP, ByteInputs, ByteRows
from trimaran.kernels.triton.attention import decode as triton_attention_decode
from trimaran.kernels.triton.norm import norm_heads

logger = logging.getLogger(__name__)

# Shapes: S sequences, N query heads, H head size.

_MIN_SHARED_ROWS = 40
"""Rows of a step from which a token and its drafts read their keys together. With fewer rows
separate reads fill more of the GPU's processors and take less time."""


class DecodeAttention(Protocol):
    """Attention of a step's leading decodes, one query each."""

    @property
    def backend(self) -> str:
        """The name in logs and metrics."""
        ...

    def __call__(
        self,
        query_SNH: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        output_SNH: Tensor,
        *,
        is_fixed: bool = False,
    ) -> None: ...

    def rotated(
        self,
        heads_SAH: Tensor,
        cos_sin_PR: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        norms: HeadNorms | None = None,
        *,
        is_fixed: bool = False,
    ) -> Tensor | None:
        """`Ops.rope_and_cache` with rotation by halves of heads, then the attention of a
        step of decodes alone, [S, N, H], in one kernel behind that of ``norms``, if any; None,
        without effect, where no such kernel applies.
        """
        ...

    def quantized(
        self,
        heads_SAH: Tensor,
        cos_sin_PR: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        inputs: ByteInputs,
        norms: HeadNorms | None = None,
    ) -> ByteRows | None:
        """`rotated`, with each query head as a group of the inputs of an FP8 product."""
        ...


class TritonDecodes:
    """Any attention on any GPU."""

    backend = "triton"
    __call__ = staticmethod(triton_attention_decode.decode)

    def rotated(self, *_arguments: object, is_fixed: bool = False) -> None:
        """Rotation is a kernel of its own."""

    def quantized(self, *_arguments: object) -> None:
        """Quantization is a kernel of its own."""


class HopperDecodes:
    """Our CUDA C++ kernels, and Triton kernels for unsupported shapes.

    The layer's shape and spec determine which kernel serves it, never the batch. Times on an
    H200 in microseconds a layer, 8B shape (32 heads of 128 that share 8, bf16), in a CUDA
    graph, CUDA C++ and Triton: 1 sequence of 256 tokens 4.3 and 7.2, 64 of them 18 and 23, 256
    of them 64 and 74, 256 of 1,024 247 and 263, 768 of 1,500 1,063 and 1,079, one of 20,000 27
    and 41, the same beside 255 of 128 57 and 65. 256 of 150 take 41; their bytes take 37 at 4.3
    TB/s. Over an FP8 cache 256 of 1,024 take 126 and 281.
    """

    backend = "cuda"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        cuda_decode.load(device, dtype)
        self._refused: set[str] = set()

    def __call__(
        self,
        query_SNH: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        output_SNH: Tensor,
        *,
        is_fixed: bool = False,
    ) -> None:
        """Attend, into the sequences' rows of ``output``."""
        refusal = cuda_decode.refusal(query_SNH, kv_cache, spec)
        if refusal is None:
            cuda_decode.decode(
                query_SNH, kv_cache, metadata, spec, output_SNH, is_fixed=is_fixed,
                shares_reads=len(query_SNH) >= _MIN_SHARED_ROWS,
            )  # fmt: skip
            return
        if refusal not in self._refused:
            self._refused.add(refusal)
            logger.info("attention of decodes with %s is Triton's", refusal)
        triton_attention_decode.decode(
            query_SNH, kv_cache, metadata, spec, output_SNH, is_fixed=is_fixed
        )  # fmt: skip

    def rotated(
        self,
        heads_SAH: Tensor,
        cos_sin_PR: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        norms: HeadNorms | None = None,
        *,
        is_fixed: bool = False,
    ) -> Tensor | None:
        """Rotate, store and attend in one kernel, which saves a launch for each layer."""
        query_SNH = heads_SAH[:, : -2 * kv_cache.shape[3]]
        if not _rotates(query_SNH, kv_cache, cos_sin_PR, spec):
            return None
        _normalise(heads_SAH, norms, kv_cache)
        output_SNH = torch.empty_like(query_SNH, memory_format=torch.contiguous_format)
        cuda_decode.decode(
            query_SNH, kv_cache, metadata, spec, output_SNH, is_fixed=is_fixed,
            cos_sin_PH=cos_sin_PR,
        )  # fmt: skip
        return output_SNH

    def quantized(
        self,
        heads_SAH: Tensor,
        cos_sin_PR: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        inputs: ByteInputs,
        norms: HeadNorms | None = None,
    ) -> ByteRows | None:
        """Rotate, store, attend and quantize in one kernel, for heads of `GROUP` dims."""
        query_SNH = heads_SAH[:, : -2 * kv_cache.shape[3]]
        if query_SNH.shape[2] != GROUP or inputs.has_power_scales:
            return None
        if not _rotates(query_SNH, kv_cache, cos_sin_PR, spec):
            return None
        _normalise(heads_SAH, norms, kv_cache)
        sequences, num_heads, _ = query_SNH.shape
        values_SNH = query_SNH.new_empty(query_SNH.shape, dtype=FP8)
        pitch = -(-sequences // 8) * 8
        scales_NP = query_SNH.new_empty((num_heads, pitch), dtype=torch.float32)
        output = cuda_decode.QuantizedHeads(values_SNH, Quantization.of(scales_NP, inputs))
        cuda_decode.decode(query_SNH, kv_cache, metadata, spec, output, cos_sin_PH=cos_sin_PR)
        return ByteRows(values_SNH.view(sequences, -1), scales_NP, query_SNH.dtype)


def _normalise(heads_SAH: Tensor, norms: HeadNorms | None, kv_cache: Tensor) -> None:
    if norms is not None:
        norm_heads(heads_SAH, norms.query, norms.key, kv_cache.shape[3], norms.eps)


def _rotates(
    query_SNH: Tensor, kv_cache: Tensor, cos_sin_PR: Tensor, spec: AttentionSpec
) -> bool:
    """Whether our kernel rotates and stores besides attending."""
    if not cuda_decode.rotates(query_SNH, kv_cache, cos_sin_PR):
        return False
    return cuda_decode.refusal(query_SNH, kv_cache, spec) is None


def select_decode_attention(device: torch.device, dtype: torch.dtype) -> DecodeAttention:
    """The fastest kernels measured for this device and dtype."""
    if device.type != "cuda" or dtype not in cuda_decode.DTYPES:
        return TritonDecodes()
    if torch.cuda.get_device_capability(device) != (9, 0):
        return TritonDecodes()
    try:
        return HopperDecodes(device, dtype)
    except KernelsUnavailableError as error:
        logger.warning("attention of decodes is Triton's, at lower speed: %s", error)
        return TritonDecodes()
