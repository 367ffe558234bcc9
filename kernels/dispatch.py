"""The choice of kernels for a device and dtype, made once and visible by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from trimaran.kernels import reference
from trimaran.kernels.build import KernelsUnavailableError, load_library
from trimaran.kernels.cpu import CpuOps
from trimaran.kernels.decoder import Decoder, DecoderShape, LayerWeights

logger = logging.getLogger(__name__)


class Ops(Protocol):
    """The operators that layers are made of; `reference` says what each one computes."""

    pads_to_longest: bool
    """Whether attention takes all sequences of a call as long as the longest."""

    @property
    def backends(self) -> dict[str, str]:
        """Backend name by operator, for the log and the metrics."""
        ...

    def fuse_decoder(
        self, shape: DecoderShape, layers: Sequence[LayerWeights]
    ) -> Decoder | None:
        """These layers as one operator; None if this backend has none for them."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def linear_float32(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor: ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor: ...

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor: ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor: ...

    def activation(self, x: Tensor, name: str) -> Tensor: ...

    def rotate(self, x: Tensor, cos_sin: Tensor, positions: Tensor) -> None: ...

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None: ...

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        scale: float,
        max_query_len: int,
        max_seq_len: int,
    ) -> Tensor: ...


class TorchOps:
    """All operators in plain torch, on any device."""

    pads_to_longest = True

    linear = staticmethod(reference.linear)
    linear_float32 = staticmethod(reference.linear_float32)
    rms_norm = staticmethod(reference.rms_norm)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    layer_norm = staticmethod(reference.layer_norm)
    add_layer_norm = staticmethod(reference.add_layer_norm)
    silu_and_mul = staticmethod(reference.silu_and_mul)
    activation = staticmethod(reference.activation)
    rotate = staticmethod(reference.rotate)
    write_kv = staticmethod(reference.write_kv)
    paged_attention = staticmethod(reference.paged_attention)

    def fuse_decoder(
        self, shape: DecoderShape, layers: Sequence[LayerWeights]
    ) -> Decoder | None:
        """Torch runs layers operator by operator."""
        return None

    @property
    def backends(self) -> dict[str, str]:
        """Every operator is torch's."""
        return dict.fromkeys(reference.OPERATORS, "torch")


def select_ops(device: torch.device, dtype: torch.dtype, num_threads: int = 1) -> Ops:
    """The fastest operators that this device and dtype have; ``num_threads`` is for a CPU."""
    if device.type != "cpu":
        return TorchOps()
    try:
        return CpuOps(load_library(), dtype, num_threads)
    except KernelsUnavailableError as error:
        logger.warning("torch serves all operators, several times slower: %s", error)
        return TorchOps()
