"""Products by integer weights on a GPU: the weight's storage, and the kernel's cut."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.kernels.build import KernelsUnavailableError
from trimaran.kernels.cuda import integer_choice, integer_gemm, integer_skinny
from trimaran.kernels.cuda.build import check_compiler
from trimaran.kernels.cuda.hopper_gemm import can_multiply
from trimaran.kernels.cuda.integer_floats import compile_floats, dequantize
from trimaran.kernels.cuda.integer_units import UNIT_INPUTS, UnitFormat, can_pack, pack_units
from trimaran.kernels.integer_columns import Columns, narrowest
from trimaran.kernels.integer_reference import quantize_inputs
from trimaran.kernels.integers import IntegerProduct, IntegerWeight
from trimaran.kernels.triton.integer_gemm import Cut, Steps, multiply
from trimaran.kernels.triton.launch import padded_size

# Shapes: T tokens, D inner width, E outputs, G groups of inputs, K columns with padding.

_FULL_TILES = 192
"""Programs from which a product keeps all multiprocessors of the largest GPU busy."""

_FLOAT_ROWS = 1024
"""Rows from which the CUDA kernel that scales sums is slower than torch's product of
dequantized weights."""

_MAX_ROUNDED_SCALE = 127
"""Scales from which the kernels that round weights would overflow in float16."""

_MAX_PARTS = 8

FIXED_CUT = Cut(64, 128, warps=4, stages=4)
"""The cut whatever the number of rows, for results that do not depend on it."""


def choose_cut(rows: int, outputs: int, num_steps: int) -> Cut:
    """The cut of a product by Triton: enough programs for all multiprocessors."""
    if rows > 64:
        return Cut(128, 128, warps=8, stages=3)
    columns = 64 if rows <= 32 else 128
    tiles, parts = -(-outputs // columns), 1
    while tiles * parts < _FULL_TILES and parts < _MAX_PARTS and num_steps >= 8 * parts:
        parts *= 2
    return Cut(max(16, padded_size(rows)), columns, parts, warps=4, stages=5)


class _GpuProduct:
    """`IntegerProduct` of inputs in the order of columns; a subclass multiplies.

    With ``is_fixed`` a token's result does not depend on the other tokens or their number.
    Inputs in other than whole groups are gathered first. Signed bytes of inputs are multiplied
    as floats, which hold them exactly.
    """

    def __init__(
        self, weight: IntegerWeight, columns: Columns, *, has_byte_inputs: bool, is_fixed: bool
    ) -> None:
        self._columns = columns
        self._is_fixed = is_fixed
        self._has_byte_inputs = has_byte_inputs
        self._input_scale = weight.input_scale

    def __call__(
        self, x_TD: Tensor, bias_E: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `IntegerProduct`. Safe under CUDA graph capture."""
        dtype = dtype or x_TD.dtype
        if not self._has_byte_inputs:
            return self._multiply(self._columns.gather(x_TD), bias_E, dtype)
        values_TD, scales_T1 = quantize_inputs(x_TD, self._input_scale)
        x_TK = self._columns.gather(values_TD.to(x_TD.dtype))
        total_TE = self._multiply(x_TK, None, torch.float32) * scales_T1
        return (total_TE if bias_E is None else total_TE + bias_E).to(dtype)

    def gated(self, x_TD: Tensor) -> Tensor | None:
        """See `IntegerProduct`."""
        return None

    def _multiply(self, x_TK: Tensor, bias_E: Tensor | None, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError


class TritonIntegerProduct(_GpuProduct):
    """`IntegerProduct` by Triton's kernel."""

    def __init__(self, weight: IntegerWeight, *, has_byte_inputs: bool, is_fixed: bool) -> None:
        columns = Columns.of(weight)
        super().__init__(weight, columns, has_byte_inputs=has_byte_inputs, is_fixed=is_fixed)
        self._steps = _steps_of(weight, columns)

    @property
    def nbytes(self) -> int:
        """See `IntegerProduct`."""
        steps, order = self._steps, self._columns.order
        parts = (steps.values, steps.scales, steps.zeros, steps.minimums, order)
        return sum(each.nbytes for each in parts if each is not None)

    def _multiply(self, x_TK: Tensor, bias_E: Tensor | None, dtype: torch.dtype) -> Tensor:
        steps = self._steps
        cut = FIXED_CUT
        if not self._is_fixed:
            cut = choose_cut(x_TK.shape[0], steps.values.shape[0], steps.groups.shape[0])
        return multiply(x_TK, steps, bias_E, dtype, cut)


class HopperIntegerProduct(_GpuProduct):
    """`IntegerProduct` by the CUDA kernel of Hopper GPUs, for inputs of ``dtype``: bfloat16 or
    float16."""

    def __init__(
        self,
        weight: IntegerWeight,
        dtype: torch.dtype,
        *,
        has_byte_inputs: bool,
        is_fixed: bool,
        is_gated: bool = False,
    ) -> None:
        columns = Columns.of(weight)
        super().__init__(weight, columns, has_byte_inputs=has_byte_inputs, is_fixed=is_fixed)
        self._units = pack_units(weight, columns)
        # Bytes of inputs are multiplied by exact integers.
        has_cuts = not (is_fixed or has_byte_inputs)
        self._can_round = has_cuts and bool((weight.scales.abs() < _MAX_ROUNDED_SCALE).all())
        self._can_gate = self._can_round and is_gated and integer_choice.can_gate(self._units)
        num_columns = weight.shape[1] if columns.order is None else len(columns.order)
        takes_few = has_cuts and num_columns % UNIT_INPUTS == 0
        self._takes_few = takes_few and integer_skinny.can_multiply(self._units, is_gated=False)
        self._gates_few = (
            takes_few and is_gated and integer_skinny.can_multiply(self._units, is_gated=True)
        )
        if self._takes_few:
            integer_skinny.compile_variants(self._units, dtype, is_gated=False)
        if self._gates_few:
            integer_skinny.compile_variants(self._units, dtype, is_gated=True)
        max_rows = integer_choice.MIN_ROWS - 1 if self._can_round else _FLOAT_ROWS
        integer_gemm.compile_variants(self._units, dtype, max_rows, is_fixed=is_fixed)
        if self._can_round:
            integer_choice.compile_variants(self._units, dtype, has_gates=self._can_gate)
        elif not is_fixed:
            compile_floats(UnitFormat.of(self._units, dtype))

    @property
    def nbytes(self) -> int:
        """See `IntegerProduct`."""
        order = self._columns.order
        return self._units.values.nbytes + (0 if order is None else order.nbytes)

    def gated(self, x_TD: Tensor) -> Tensor | None:
        """Few rows and many rows, by one kernel."""
        rows = x_TD.shape[0]
        if self._gates_few and 0 < rows <= integer_skinny.MAX_ROWS:
            x_TK = self._columns.gather(x_TD)
            return integer_skinny.multiply(x_TK, self._units, None, x_TD.dtype, is_gated=True)
        if not self._can_gate or rows < integer_choice.MIN_ROWS:
            return None
        return integer_choice.multiply_gated(self._columns.gather(x_TD), self._units)

    def _multiply(self, x_TK: Tensor, bias_E: Tensor | None, dtype: torch.dtype) -> Tensor:
        units, rows = self._units, x_TK.shape[0]
        if self._takes_few and 0 < rows <= integer_skinny.MAX_ROWS:
            return integer_skinny.multiply(x_TK, units, bias_E, dtype, is_gated=False)
        is_rounded = self._can_round and dtype == x_TK.dtype
        if is_rounded and rows >= integer_choice.MIN_ROWS:
            return integer_choice.multiply(x_TK, units, bias_E)
        if rows >= _FLOAT_ROWS and not self._is_fixed:
            weight_EK = dequantize(units, x_TK.dtype)[:, : x_TK.shape[1]]
            if dtype == x_TK.dtype:
                return F.linear(x_TK, weight_EK, bias_E)
            total_TE = torch.mm(x_TK, weight_EK.T, out_dtype=dtype)
            return total_TE if bias_E is None else total_TE + bias_E
        tiles, steps, _ = units.values.shape
        cut = integer_gemm.choose_cut(rows, tiles, steps, is_fixed=self._is_fixed)
        return integer_gemm.multiply(x_TK, units, bias_E, dtype, cut)


class IntegerProducts(NamedTuple):
    """The kernels of integer weights for one GPU and dtype."""

    dtype: torch.dtype | None = None
    """Dtype of the inputs of Hopper's CUDA kernel; None: Triton multiplies."""

    is_fixed: bool = False

    @property
    def backend(self) -> str:
        """The kernels by name."""
        return "triton" if self.dtype is None else "cuda, triton"

    def make(
        self, weight: IntegerWeight, *, has_byte_inputs: bool, is_gated: bool
    ) -> IntegerProduct:
        """The product by a weight; with ``is_gated`` of gates above ups. Triton multiplies by a
        weight that has minimums, zero points outside of the range of its integers, or FP4
        numbers."""
        if self.dtype is None or not can_pack(weight):
            return TritonIntegerProduct(
                weight, has_byte_inputs=has_byte_inputs, is_fixed=self.is_fixed
            )
        return HopperIntegerProduct(
            weight,
            self.dtype,
            has_byte_inputs=has_byte_inputs,
            is_fixed=self.is_fixed,
            is_gated=is_gated,
        )


def select_integer_products(
    device: torch.device, dtype: torch.dtype, is_deterministic: bool = False
) -> IntegerProducts:
    """The fastest kernels for a GPU and the dtype of inputs."""
    if not can_multiply(device, dtype):
        return IntegerProducts(is_fixed=is_deterministic)
    try:
        check_compiler()
    except KernelsUnavailableError:
        return IntegerProducts(is_fixed=is_deterministic)
    return IntegerProducts(dtype, is_deterministic)


def _steps_of(weight: IntegerWeight, columns: Columns) -> Steps:
    values = columns.packed(weight)
    scales, minimums = weight.scales.t().contiguous(), None
    if weight.minimums is not None:
        minimums = weight.minimums.t().contiguous()
    dtype = narrowest([scales] if minimums is None else [scales, minimums])
    return Steps(
        values,
        scales.to(dtype),
        None if weight.zeros is None else weight.zeros.t().contiguous(),
        None if minimums is None else minimums.to(dtype),
        columns.groups,
        columns.step,
        weight.bits,
        weight.is_fp4,
    )
