"""The choice of kernels for the attention of prompts on a GPU."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.build import KernelsUnavailableError
from trimaran.kernels.cuda import attention as cuda_attention
from trimaran.kernels.triton.attention import prefill as triton_attention_prefill

logger = logging.getLogger(__name__)

# Shapes: T tokens, N query heads, H head size.


class PromptAttention(Protocol):
    """Attention of all sequences behind a step's leading decodes."""

    @property
    def backend(self) -> str:
        """The name in logs and metrics."""
        ...

    def __call__(
        self,
        query_TNH: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        output_TNH: Tensor,
    ) -> None: ...


class TritonPrompts:
    """Any attention on any GPU."""

    backend = "triton"
    __call__ = staticmethod(triton_attention_prefill.prefill)


class HopperPrompts:
    """Our CUDA C++ kernels, and Triton kernels for unsupported shapes.

    The layer's shape and spec alone determine which kernel serves it, never the batch. On an
    H200 the CUDA C++ kernels reach 558 and 621 TFLOP/s for 4 prompts of 2,048 and one of 8,192
    tokens of the 8B shape (32 heads of 128 that share 8, bf16), Triton's 303 and 333. cuDNN's
    dense attention through torch, which supports neither prompts of different lengths nor
    blocks, reaches 517 and 560.
    """

    backend = "cuda"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        cuda_attention.load(device, dtype)
        self._refused: set[str] = set()

    def __call__(
        self,
        query_TNH: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        output_TNH: Tensor,
    ) -> None:
        """Attend, into the tokens' rows of ``output``."""
        refusal = cuda_attention.refusal(query_TNH, kv_cache, spec)
        if refusal is None:
            cuda_attention.prefill(query_TNH, kv_cache, metadata, spec, output_TNH)
            return
        if refusal not in self._refused:
            self._refused.add(refusal)
            logger.info("attention of prompts with %s is Triton's", refusal)
        triton_attention_prefill.prefill(query_TNH, kv_cache, metadata, spec, output_TNH)


def select_prompt_attention(device: torch.device, dtype: torch.dtype) -> PromptAttention:
    """The fastest kernels measured for this device and dtype."""
    if device.type != "cuda" or dtype not in cuda_attention.DTYPES:
        return TritonPrompts()
    if torch.cuda.get_device_capability(device) != (9, 0):
        return TritonPrompts()
    try:
        return HopperPrompts(device, dtype)
    except KernelsUnavailableError as error:
        logger.warning("attention of prompts is Triton's, at half the speed: %s", error)
        return TritonPrompts()
