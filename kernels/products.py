"""Matrix products on a GPU: the fastest that was measured for a shape and number of rows."""

from __future__ import annotations

import functools
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.kernels.build import KernelsUnavailableError
from trimaran.kernels.cuda_build import check_compiler
from trimaran.kernels.hopper_gemm import HopperGemm, NextWeight, can_multiply, compile_gemm
from trimaran.kernels.product_table import Choice, GemmShape, Kind, ProductTable, fixed_choice
from trimaran.kernels.reference import add_linear
from trimaran.kernels.split_product import num_parts, split_product
from trimaran.kernels.triton_elementwise import silu_and_mul
from trimaran.kernels.triton_skinny import can_stream, stream_gated, stream_parts

logger = logging.getLogger(__name__)

# Shapes: T tokens, D inner width, E outputs of the weight.

_MOST_AHEAD_ROWS = 128
"""With more rows a product waits for arithmetic rather than for memory."""


class Products(Protocol):
    """Products of one kind of GPU."""

    backend: str

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def add_linear(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor | None: ...

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor: ...


class TorchProducts:
    """Torch's own products."""

    backend = "torch"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias`` in the dtype of ``x``."""
        return F.linear(x, weight, bias)

    def add_linear(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor | None:
        """Add ``x @ weight.T`` into ``residual``."""
        return add_linear(x, weight, residual)

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """``silu(x @ gate.T) * (x @ up.T)``, with gate rows above up rows."""
        return silu_and_mul(F.linear(x, weight))


class HopperProducts:
    """Products with weights of one dtype on one Hopper GPU, by our kernel or by torch.

    With ``is_deterministic`` a row's result depends neither on the other rows nor on their
    number: our kernel multiplies, with a split that the weight alone decides.

    A model multiplies with its weights in one order: a product of few rows asks for the
    beginning of the weight that followed it the last time.
    """

    ahead_bytes = 0
    """Of the next weight, what is brought into the cache; 0 for nothing."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, is_deterministic: bool = False
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._is_deterministic = is_deterministic
        self._table = ProductTable.of_device(torch.cuda.get_device_name(device))
        self._kernels: dict[tuple[GemmShape, Kind], HopperGemm] = {}
        self._compiled: set[tuple[int, int, Kind]] = set()
        self._last = 0
        self._followers: dict[int, tuple[weakref.ref[Tensor], Kind]] = {}
        self.backend = "cuda" if is_deterministic else "cuda, triton, torch"

    def linear(self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias`` in the dtype of ``x``."""
        kernel = self._kernel(x_TD, weight_ED, "plain")
        if kernel is None:
            return F.linear(x_TD, weight_ED, bias_E)
        output_TE = kernel(x_TD, weight_ED, self._following(x_TD, weight_ED))
        return output_TE if bias_E is None else output_TE + bias_E

    def add_linear(self, x_TD: Tensor, weight_ED: Tensor, residual_TE: Tensor) -> Tensor | None:
        """Torch adds its product into ``residual``, or it is returned, maybe in parts."""
        if self._streams(x_TD, weight_ED, is_gated=False):
            return stream_parts(x_TD, weight_ED)
        kernel = self._kernel(x_TD, weight_ED, "plain" if self._is_deterministic else "parts")
        if kernel is not None:
            return kernel(x_TD, weight_ED, self._following(x_TD, weight_ED))
        parts = num_parts(x_TD.shape[0], *weight_ED.shape)
        if parts > 1:
            return split_product(x_TD, weight_ED, parts)
        return add_linear(x_TD, weight_ED, residual_TE)

    def gated_linear(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """``silu(x @ gate.T) * (x @ up.T)`` [T, E / 2], gate rows above up rows."""
        if self._streams(x_TD, weight_ED, is_gated=True):
            return stream_gated(x_TD, weight_ED)
        kernel = self._kernel(x_TD, weight_ED, "gated")
        if kernel is None:
            return silu_and_mul(self.linear(x_TD, weight_ED))
        return kernel(x_TD, weight_ED, self._following(x_TD, weight_ED))

    def _streams(self, x_TD: Tensor, weight_ED: Tensor, *, is_gated: bool) -> bool:
        """Whether the product of so few rows is Triton's."""
        if self._is_deterministic:
            return False
        return can_stream(x_TD.shape[0], weight_ED, is_gated=is_gated)

    def _kernel(self, x_TD: Tensor, weight_ED: Tensor, kind: Kind) -> HopperGemm | None:
        outputs, inner = weight_ED.shape
        self._followers[self._last] = (weakref.ref(weight_ED), kind)
        self._last = weight_ED.data_ptr()
        choice = self._choice(x_TD.shape[0], weight_ED, kind)
        if choice is None:
            return None
        kernel = self._kernels.get((choice, kind))
        if kernel is None:
            self._compile(outputs, inner, kind)
            kernel = HopperGemm(choice, self._dtype, self._device, kind)
            self._kernels[(choice, kind)] = kernel
        return kernel

    def _choice(self, num_rows: int, weight_ED: Tensor, kind: Kind) -> Choice:
        outputs, inner = weight_ED.shape
        if self._is_deterministic:
            return fixed_choice(num_rows, outputs, inner)
        return self._table.pick(num_rows, outputs, inner, kind)

    def _following(self, x_TD: Tensor, weight_ED: Tensor) -> NextWeight | None:
        """The weight that comes next, where memory is what a product waits for."""
        num_rows = x_TD.shape[0]
        follower = self._followers.get(weight_ED.data_ptr())
        if follower is None or num_rows > _MOST_AHEAD_ROWS or not self.ahead_bytes:
            return None
        reference, kind = follower
        weight = reference()
        choice = None if weight is None else self._choice(num_rows, weight, kind)
        if weight is None or choice is None:
            return None
        return NextWeight(weight, choice.split, self.ahead_bytes)

    def _compile(self, outputs: int, inner: int, kind: Kind) -> None:
        """Compile all that the table has for a weight, side by side, when it is first seen."""
        if (outputs, inner, kind) in self._compiled:
            return
        self._compiled.add((outputs, inner, kind))
        choices = self._table.choices(outputs, inner, kind)
        compile_one = functools.partial(compile_gemm, dtype=self._dtype, kind=kind)
        with ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(compile_one, choices))


def select_products(
    device: torch.device, dtype: torch.dtype, is_deterministic: bool = False
) -> Products:
    """The fastest products of a GPU; `ConfigError` where it has no deterministic ones."""
    reason = _refusal(device, dtype)
    if reason is None:
        return HopperProducts(device, dtype, is_deterministic)
    if is_deterministic:
        raise ConfigError(
            f"deterministic products are not served here: {reason}. Serve without "
            "deterministic, in bfloat16 or float16 on a GPU of compute capability 9.0, or on "
            "the CPU."
        )
    logger.info("torch multiplies matrices: %s", reason)
    return TorchProducts()


def _refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why our kernel cannot multiply; None if it can."""
    if not can_multiply(device, dtype):
        return f"our kernel takes no {dtype} on {torch.cuda.get_device_name(device)}"
    try:
        check_compiler()
    except KernelsUnavailableError as error:
        return str(error)
    return None
