"""The choice of kernels for a device and dtype, made once and visible by name."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.kernels.attention import AttentionMetadata, AttentionSpec, LatentHeads
from trimaran.kernels.build import KernelsUnavailableError, load_library
from trimaran.kernels.cpu.decoder import Decoder, DecoderShape, LayerWeights
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.kernels.routing import ExpertCounter, ExpertRouting, PlaceTable
from trimaran.kernels.torch_ops import TorchOps

logger = logging.getLogger(__name__)


class Ops(Protocol):
    """The operators that layers are made of; `reference` says what each one computes."""

    @property
    def backends(self) -> dict[str, str]:
        """Backend name by operator, for the log and the metrics."""
        ...

    @property
    def is_deterministic(self) -> bool:
        """Whether a token's result does not depend on the tokens beside it."""
        ...

    def fuse_decoder(
        self, shape: DecoderShape, layers: Sequence[LayerWeights]
    ) -> Decoder | None:
        """These layers as one operator; None if this backend has none for them."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def logits(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def add_linear(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor | None: ...

    def linear_parts(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor: ...

    def norm_heads(
        self,
        heads: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        num_kv: int,
        eps: float,
    ) -> None: ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor: ...

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor: ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor: ...

    def gelu_and_mul(self, gate_up: Tensor, name: str) -> Tensor: ...

    def activation(self, x: Tensor, name: str) -> Tensor: ...

    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def choose_experts(
        self,
        logits: Tensor,
        routing: ExpertRouting,
        bias: Tensor | None = None,
        counter: ExpertCounter | None = None,
        table: PlaceTable | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def expert_mlp(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Tensor,
        down: Tensor,
        first_expert: int = 0,
    ) -> Tensor: ...

    def embed(self, ids: Tensor, table: Tensor, first_row: int | None = None) -> Tensor: ...

    def rope_and_cache(
        self,
        heads: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        slots: Tensor,
        is_neox: bool = True,
    ) -> None: ...

    def rope_and_cache_latent(
        self,
        query: Tensor,
        latent: Tensor,
        key: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        slots: Tensor,
        is_neox: bool = True,
    ) -> None: ...

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None: ...

    def rotated_attention(
        self,
        heads: Tensor,
        cos_sin: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        is_neox: bool = True,
    ) -> Tensor | None:
        """`rope_and_cache` at the places that ``metadata`` says, and then `paged_attention`
        of the queries among ``heads``; None, and nothing done, where that is not one
        operator here."""
        ...

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
    ) -> Tensor: ...

    def latent_attention(
        self,
        query: Tensor,
        latent: Tensor,
        key: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        heads: LatentHeads,
    ) -> Tensor: ...


def select_ops(
    device: torch.device, dtype: torch.dtype, num_threads: int = 1, deterministic: bool = False
) -> Ops:
    """The fastest operators that this device and dtype have; ``num_threads`` is for a CPU.

    With ``deterministic``, the fastest whose result for a token does not depend on the
    tokens beside it. Those of our own kernels for a CPU never do.

    Raises:
        ConfigError: there are none such, or none at all, for this device.
    """
    if device.type != "cpu":
        return _gpu_ops(device, dtype, deterministic)
    try:
        return CpuOps(load_library(), dtype, num_threads)
    except KernelsUnavailableError as error:
        if deterministic:
            raise ConfigError(
                f"--deterministic is set but the CPU's kernels are not to be had ({error}), "
                "and torch, which would serve all operators, rounds a token's products by how "
                "many tokens there are. Provide the kernels, or serve without it."
            ) from error
        logger.warning("torch serves all operators, several times slower: %s", error)
        return TorchOps()


def _gpu_ops(device: torch.device, dtype: torch.dtype, deterministic: bool) -> Ops:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"device is {device.type} but the package triton, by which a GPU runs, is not "
            "installed. Install it (pip install 'trimaran[gpu]'), or serve on the CPU."
        )
    # Imported only now: a CPU needs no Triton.
    from trimaran.kernels.decode_attention import select_decode_attention
    from trimaran.kernels.experts import select_experts
    from trimaran.kernels.gpu import TritonOps
    from trimaran.kernels.products import select_products
    from trimaran.kernels.prompt_attention import select_prompt_attention

    return TritonOps(
        deterministic,
        select_products(device, dtype, deterministic),
        select_prompt_attention(device, dtype),
        select_decode_attention(device, dtype),
        select_experts(device, dtype, deterministic),
    )
