"""Matrix products on a GPU: the fastest kernel measured for a shape and a number of rows."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.kernels.build import KernelsUnavailableError
from trimaran.kernels.compilations import hooks
from trimaran.kernels.cuda.build import check_compiler
from trimaran.kernels.cuda.hopper_gemm import HopperGemm, can_multiply
from trimaran.kernels.cuda.skinny_gemm import SkinnyGemm, compile_choice
from trimaran.kernels.reference import add_linear
from trimaran.kernels.tables.product_table import (
    Choice,
    GemmShape,
    Kind,
    ProductTable,
    SkinnyShape,
    fixed_choice,
)
from trimaran.kernels.tables.tuned_choices import TunedChoices
from trimaran.kernels.triton.elementwise import silu_and_mul
from trimaran.kernels.triton.skinny import (
    MAX_DOT_ROWS,
    can_stream,
    row_products,
    stream_gated,
    stream_parts,
)

# Shapes: T tokens, D inner width, E outputs, S parts.

_TILE = 128
_MAX_TILES = 64


def num_parts(num_rows: int, outputs: int, inner: int) -> int:
    """The number of parts in which a product with a weight [outputs, inner] is fastest.

    A product of few output tiles keeps few multiprocessors busy, and library kernels that split
    such a product add the parts in a separate launch. Measured on an H200 for outputs 4,096 and
    inner widths 4,096 and 14,336 (1 to 256 rows: 5 to 25 % faster than unsplit).
    """
    tiles = -(-outputs // _TILE) * -(-num_rows // _TILE)
    parts = 1 if tiles > _MAX_TILES else 4 if num_rows <= 64 else 2
    # With other outputs the alignment of parts would depend on the number of rows, and the
    # kernel that adds them would be compiled for both.
    return parts if inner % (8 * parts) == outputs % 16 == 0 else 1


def split_product(x_TD: Tensor, weight_ED: Tensor, parts: int) -> Tensor:
    """Float32 [S, T, E] whose sum over S is ``x @ weight.T``.

    bf16 or float16 on a GPU, rows contiguous, D a multiple of S.
    """
    (tokens, inner), outputs = x_TD.shape, weight_ED.shape[0]
    x_STI = x_TD.view(tokens, parts, inner // parts).transpose(0, 1)
    weight_SIE = weight_ED.view(outputs, parts, inner // parts).permute(1, 2, 0)
    return torch.bmm(x_STI, weight_SIE, out_dtype=torch.float32)


logger = logging.getLogger(__name__)

# Shapes: T tokens, D inner width, E outputs of the weight.


class Products(Protocol):
    """Products of one kind of GPU."""

    backend: str

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def add_linear(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor | None: ...

    def linear_parts(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor: ...


class TorchProducts:
    """Torch's own products."""

    backend = "torch"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias`` in the dtype of ``x``."""
        return F.linear(x, weight, bias)

    def add_linear(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor | None:
        """Add ``x @ weight.T`` into ``residual``."""
        return add_linear(x, weight, residual)

    def linear_parts(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x @ weight.T``, complete."""
        return F.linear(x, weight)

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """``silu(x @ gate.T) * (x @ up.T)``, with gate rows above up rows."""
        return silu_and_mul(F.linear(x, weight))

    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x @ weight.T`` as float32, never rounded to the weights' dtype."""
        return float_product(x, weight)


class HopperProducts:
    """Products with weights of one dtype on one Hopper GPU, by our kernel or by torch.

    With ``is_deterministic`` a row's result depends neither on the other rows nor on their
    number: our kernel multiplies, with a split that depends on the weight alone. ``table`` is
    the device's table by default.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        is_deterministic: bool = False,
        table: ProductTable | None = None,
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._is_deterministic = is_deterministic
        self._table = table or ProductTable.of_device(torch.cuda.get_device_name(device))
        self._kernels: dict[tuple[GemmShape | SkinnyShape, Kind], HopperGemm | SkinnyGemm] = {}
        self._compiled: set[tuple[int, int, Kind]] = set()
        self.backend = "cuda" if is_deterministic else "cuda, triton, torch"

    def linear(self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias`` in the dtype of ``x``."""
        kernel = self._kernel(x_TD, weight_ED, "plain")
        if kernel is None:
            return F.linear(x_TD, weight_ED, bias_E)
        output_TE = kernel(x_TD, weight_ED)
        return output_TE if bias_E is None else output_TE + bias_E

    def add_linear(self, x_TD: Tensor, weight_ED: Tensor, residual_TE: Tensor) -> Tensor | None:
        """Add the product into ``residual``, or return the product, possibly in parts."""
        product = self._own_product(x_TD, weight_ED)
        return add_linear(x_TD, weight_ED, residual_TE) if product is None else product

    def linear_parts(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """``x @ weight.T``, maybe in float32 parts [S, T, E]."""
        product = self._own_product(x_TD, weight_ED)
        return self.linear(x_TD, weight_ED) if product is None else product

    def _own_product(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor | None:
        """The product that is still to be added to another tensor, maybe in parts; None if
        torch is the fastest for the complete product.
        """
        kernel = self._kernel(x_TD, weight_ED, "plain" if self._is_deterministic else "parts")
        if kernel is None:
            # The parts are added within clusters.
            kernel = self._kernel(x_TD, weight_ED, "plain")
        if kernel is not None:
            return kernel(x_TD, weight_ED)
        if self._streams(x_TD, weight_ED, is_gated=False):
            return stream_parts(x_TD, weight_ED)
        parts = num_parts(x_TD.shape[0], *weight_ED.shape)
        if parts > 1:
            return split_product(x_TD, weight_ED, parts)
        return None

    def gated_linear(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """``silu(x @ gate.T) * (x @ up.T)`` [T, E / 2], gate rows above up rows."""
        kernel = self._kernel(x_TD, weight_ED, "gated")
        if kernel is not None:
            return kernel(x_TD, weight_ED)
        if self._streams(x_TD, weight_ED, is_gated=True):
            return stream_gated(x_TD, weight_ED)
        return silu_and_mul(self.linear(x_TD, weight_ED))

    def router_logits(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """``x @ weight.T`` as float32 [T, E], never rounded to the weights' dtype."""
        if not self._is_deterministic:
            return float_product(x_TD, weight_ED)
        # Float32 output is that of a single part: the split is never more.
        rows = 64 if x_TD.shape[0] <= 64 else 128
        return self._made(GemmShape(rows, 128), "parts")(x_TD, weight_ED)[0]

    def _streams(self, x_TD: Tensor, weight_ED: Tensor, *, is_gated: bool) -> bool:
        """Whether Triton serves the product of so few rows."""
        if self._is_deterministic:
            return False
        return can_stream(x_TD.shape[0], weight_ED, is_gated=is_gated)

    def _kernel(
        self, x_TD: Tensor, weight_ED: Tensor, kind: Kind
    ) -> HopperGemm | SkinnyGemm | None:
        outputs, inner = weight_ED.shape
        if self._is_deterministic:
            choice: Choice = fixed_choice(x_TD.shape[0], outputs, inner)
        else:
            choice = self._table.pick(x_TD.shape[0], outputs, inner, kind)
        if choice is None:
            return None
        if (choice, kind) not in self._kernels:
            self._compile(outputs, inner, kind)
        return self._made(choice, kind)

    def _made(self, choice: GemmShape | SkinnyShape, kind: Kind) -> HopperGemm | SkinnyGemm:
        kernel = self._kernels.get((choice, kind))
        if kernel is None:
            if isinstance(choice, SkinnyShape):
                kernel = SkinnyGemm(choice, self._dtype, self._device, kind)
            else:
                kernel = HopperGemm(choice, self._dtype, self._device, kind)
            self._kernels[(choice, kind)] = kernel
        return kernel

    def _compile(self, outputs: int, inner: int, kind: Kind) -> None:
        """Compile all measured kernels for a weight in parallel, at its first use."""
        if (outputs, inner, kind) in self._compiled:
            return
        self._compiled.add((outputs, inner, kind))
        choices = self._table.choices(outputs, inner, kind)
        compile_one = functools.partial(compile_choice, dtype=self._dtype, kind=kind)
        name = f"products by {outputs} x {inner}"
        with hooks.waiting(name), ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(compile_one, choices))


def float_product(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """``x @ weight.T`` as float32 on a GPU: few rows by Triton, more by torch."""
    if 0 < x_TD.shape[0] <= MAX_DOT_ROWS and x_TD.stride(-1) == 1:
        return row_products(x_TD, weight_ED)
    if x_TD.dtype == torch.float32:
        return F.linear(x_TD, weight_ED)
    return torch.mm(x_TD, weight_ED.T, out_dtype=torch.float32)


def select_products(
    device: torch.device,
    dtype: torch.dtype,
    is_deterministic: bool = False,
    choices: TunedChoices | None = None,
) -> Products:
    """The fastest products of a GPU; `ConfigError` if deterministic products are
    unavailable. ``choices`` are those that the package ships by default."""
    reason = _refusal(device, dtype)
    if reason is None:
        table = choices.products if choices else None
        return HopperProducts(device, dtype, is_deterministic, table)
    if is_deterministic:
        raise ConfigError(
            f"deterministic products are not served here: {reason}. Serve without "
            "deterministic, in bfloat16 or float16 on a GPU of compute capability 9.0, or on "
            "the CPU."
        )
    logger.info("torch multiplies matrices: %s", reason)
    return TorchProducts()


def _refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why our kernel cannot multiply; None for supported inputs."""
    if not can_multiply(device, dtype):
        return f"our kernel takes no {dtype} on {torch.cuda.get_device_name(device)}"
    try:
        check_compiler()
    except KernelsUnavailableError as error:
        return str(error)
    return None
