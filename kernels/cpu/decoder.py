"""Whole decoder layers as one operator: its inputs, and the CPU's version."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trimaran.kernels.cpu.integers import CpuIntegerProduct
from trimaran.kernels.cpu.kernel import DTYPE_CODES, Kernel

# Shapes: T tokens of the step, D hidden size, P positions, H head size.


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes on this rank, and the kinds of a layer's parts."""

    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    eps: float
    activation: str
    """``silu``: gated, with gate and up stacked; otherwise an activation's own name."""

    cos_sin: Tensor | None
    """Rotation angles, or None for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer's weights on this rank, of which those of products may be integers. A norm
    without bias is a root-mean-square norm.

    The order of the fields matches the kernels' struct.
    """

    attention_norm: Tensor
    attention_norm_bias: Tensor | None
    qkv: Tensor | CpuIntegerProduct
    qkv_bias: Tensor | None
    out: Tensor | CpuIntegerProduct
    out_bias: Tensor | None
    mlp_norm: Tensor
    mlp_norm_bias: Tensor | None
    up: Tensor | CpuIntegerProduct
    up_bias: Tensor | None
    down: Tensor | CpuIntegerProduct
    down_bias: Tensor | None

    def addresses(self) -> list[int]:
        """Addresses of all weights, in order; 0 for none."""
        return [_address(getattr(self, name)) for name in self.__slots__]

    @property
    def integers(self) -> int:
        """A bit for each product, from the lowest: whether its weight is one of integers."""
        products = (self.qkv, self.out, self.up, self.down)
        return sum(
            isinstance(each, CpuIntegerProduct) << bit for bit, each in enumerate(products)
        )


def _address(weight: Tensor | CpuIntegerProduct | None) -> int:
    if weight is None:
        return 0
    return weight.data_ptr() if isinstance(weight, Tensor) else weight.address


@dataclass(slots=True)
class DecoderStep:
    """One step's inputs beside the hidden states; see `AttentionMetadata`."""

    positions: Tensor
    slots: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    kv_caches: Sequence[Tensor]
    tree_masks: Tensor | None = None


class Decoder(Protocol):
    """Some layers of a model in one call."""

    def run(
        self, halves: tuple[int, int], x_TD: Tensor, residual_TD: Tensor, step: DecoderStep
    ) -> None:
        """Run the halves ``[first, end)`` of the layers: 2 n is the attention of layer n, 2 n +
        1 its MLP.

        ``x`` is the addend of ``residual`` on entry, and again after the last half. Before half
        0, ``residual`` is uninitialised.
        """
        ...


class CpuDecoder:
    """Layers by the CPU kernels, bit for bit equal to single operators."""

    def __init__(
        self,
        library: ctypes.CDLL,
        dtype: torch.dtype,
        shape: DecoderShape,
        layers: Sequence[LayerWeights],
    ) -> None:
        self._kernel = Kernel(library, "trimaran_decoder", "24q2d")
        self._code = DTYPE_CODES[dtype]
        self._shape = shape
        self._layers = list(layers)
        self._caches: Sequence[Tensor] | None = None
        self._table = ctypes.create_string_buffer(8)
        angles = shape.cos_sin
        self._cos_sin = 0 if angles is None else angles.data_ptr()

    def run(
        self, halves: tuple[int, int], x_TD: Tensor, residual_TD: Tensor, step: DecoderStep
    ) -> None:
        """See `Decoder.run`."""
        caches = step.kv_caches
        if caches is not self._caches:
            self._use_caches(caches)
        shape, cache, masks = self._shape, caches[0], step.tree_masks
        self._kernel(
            self._code, shape.activation != "silu", ctypes.addressof(self._table), *halves,
            x_TD.data_ptr(), residual_TD.data_ptr(), x_TD.shape[0], shape.hidden, shape.inner,
            shape.num_heads, shape.num_kv_heads, shape.head_size, self._cos_sin,
            step.positions.data_ptr(), step.slots.data_ptr(),
            step.query_start_loc.data_ptr(), step.seq_lens.data_ptr(),
            step.block_tables.data_ptr(), step.seq_lens.shape[0], cache.shape[2],
            cache.stride(0), step.block_tables.stride(0),
            0 if masks is None else masks.data_ptr(), shape.head_size**-0.5, shape.eps,
        )  # fmt: skip

    def _use_caches(self, caches: Sequence[Tensor]) -> None:
        """Lay out the kernels' table of layers for these KV caches."""
        # One call has one shape of cache: layers with equal specs share a pool.
        assert all(cache.stride() == caches[0].stride() for cache in caches)
        rows = []
        for layer, cache in zip(self._layers, caches, strict=True):
            fields = [*layer.addresses(), cache.data_ptr(), layer.integers]
            rows.append(struct.pack(f"={len(fields)}q", *fields))
        self._table = ctypes.create_string_buffer(b"".join(rows))
        self._caches = caches
