"""Query, key and value products that rotate heads and write the KV cache, on Hopper."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from trimaran.kernels.hopper_gemm import GemmArguments, HopperGemm
from trimaran.kernels.product_table import ROTATED_HEAD, GemmShape

# Shapes: T tokens, D inner width, E outputs of the weight, N query heads, K key-value heads, H
# head size, B tokens of a block, P positions.


class _Heads(ctypes.Structure):
    _fields_ = (
        ("angles", ctypes.c_uint64),
        ("positions", ctypes.c_uint64),
        ("slots", ctypes.c_uint64),
        ("cache", ctypes.c_uint64),
        ("strides", ctypes.c_longlong * 4),
        ("queries", ctypes.c_int),
        ("keys", ctypes.c_int),
        ("block_shift", ctypes.c_int),
    )


class _Arguments(GemmArguments):
    # Behind those of the base.
    _fields_ = (("heads", _Heads),)  # type: ignore[assignment]


def takes(cos_sin_PH: Tensor, kv_cache: Tensor, dtype: torch.dtype) -> bool:
    """Whether heads of this cache can be rotated by their halves, whole, with such angles."""
    is_whole = cos_sin_PH.shape[1] == kv_cache.shape[4] == ROTATED_HEAD
    is_dense = cos_sin_PH.is_contiguous() and kv_cache.stride(4) == 1
    block_size = kv_cache.shape[2]
    return (
        is_whole
        and is_dense
        and cos_sin_PH.dtype == torch.float32
        and kv_cache.dtype == dtype
        and block_size & (block_size - 1) == 0
        and not any(stride % 8 for stride in kv_cache.stride()[:4])
        and kv_cache.data_ptr() % 16 == 0
    )


class RotatedGemm(HopperGemm):
    """Products with the weight of a layer's queries, keys and values, heads of 128."""

    def __init__(self, shape: GemmShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device, "rotated")

    def rotated(
        self,
        x_TD: Tensor,
        weight_ED: Tensor,
        cos_sin_PH: Tensor,
        positions_T: Tensor,
        kv_cache: Tensor,
        slots_T: Tensor,
    ) -> Tensor:
        """The rotated queries [T, N, H]; keys, rotated too, and values are in their slots.

        The bits are those of ``x @ weight.T``, rounded, and then `reference.rope_and_cache`.
        The weight has N query heads above K key and K value heads; angles and cache are as
        `takes` says, positions and slots int64 and complete before the kernel in front.
        """
        num_keys = kv_cache.shape[3]
        num_queries = weight_ED.shape[0] // ROTATED_HEAD - 2 * num_keys
        heads = _Heads(
            cos_sin_PH.data_ptr(), positions_T.data_ptr(), slots_T.data_ptr(),
            kv_cache.data_ptr(), kv_cache.stride()[:4], num_queries, num_keys,
            kv_cache.shape[2].bit_length() - 1,
        )  # fmt: skip
        width = num_queries * ROTATED_HEAD
        query_TE = x_TD.new_empty((x_TD.shape[0], width))
        arguments = _Arguments(columns=weight_ED.shape[0], pitch=width, heads=heads)
        self._launch(x_TD, weight_ED, query_TE, arguments)
        return query_TE.view(-1, num_queries, ROTATED_HEAD)
