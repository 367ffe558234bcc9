"""Products by integer weights on a GPU: the weight's storage, and the kernel's cut."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trimaran.kernels.integer_reference import quantize_inputs, unpack
from trimaran.kernels.integers import IntegerProduct, IntegerWeight
from trimaran.kernels.triton.integer_gemm import Cut, Steps, multiply
from trimaran.kernels.triton.launch import padded_size

# Shapes: T tokens, D inner width, E outputs, G groups of inputs, K columns with padding.

_MAX_STEP = 128
_MIN_STEP = 32
_FULL_TILES = 192
"""Programs from which a product keeps all multiprocessors of the largest GPU busy."""

_MAX_PARTS = 8
FIXED_CUT = Cut(64, 128, warps=4, stages=4)
"""The cut whatever the number of rows, for results that do not depend on it."""


def choose_cut(rows: int, outputs: int, num_steps: int) -> Cut:
    """The cut of a product: enough programs for all multiprocessors."""
    if rows > 64:
        return Cut(128, 128, warps=8, stages=3)
    columns = 64 if rows <= 32 else 128
    tiles, parts = -(-outputs // columns), 1
    while tiles * parts < _FULL_TILES and parts < _MAX_PARTS and num_steps >= 8 * parts:
        parts *= 2
    return Cut(max(16, padded_size(rows)), columns, parts, warps=4, stages=5)


class TritonIntegerProduct:
    """`IntegerProduct` by Triton's kernel.

    With ``is_fixed`` a token's result does not depend on the other tokens or their number.
    Inputs in other than whole groups are gathered first. Signed bytes of inputs are multiplied
    as floats, which hold them exactly.
    """

    def __init__(self, weight: IntegerWeight, *, has_byte_inputs: bool, is_fixed: bool) -> None:
        inner = weight.shape[1]
        step = _regular_step(weight, inner)
        if step:
            order, groups = None, _groups_of_steps(weight, inner, step)
        else:
            order, groups, step = _gathered(weight, inner)
        self._order = order
        self._is_fixed = is_fixed
        self._has_byte_inputs = has_byte_inputs
        self._steps = _steps_of(weight, order, groups, step)

    @property
    def nbytes(self) -> int:
        """See `IntegerProduct`."""
        steps = self._steps
        parts = (steps.values, steps.scales, steps.zeros, steps.minimums, self._order)
        return sum(each.nbytes for each in parts if each is not None)

    def __call__(
        self, x_TD: Tensor, bias_E: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `IntegerProduct`. Safe under CUDA graph capture."""
        dtype = dtype or x_TD.dtype
        if not self._has_byte_inputs:
            return self._multiply(x_TD, bias_E, dtype)
        values_TD, scales_T1 = quantize_inputs(x_TD)
        total_TE = self._multiply(values_TD.to(x_TD.dtype), None, torch.float32) * scales_T1
        return (total_TE if bias_E is None else total_TE + bias_E).to(dtype)

    def _multiply(self, x_TD: Tensor, bias_E: Tensor | None, dtype: torch.dtype) -> Tensor:
        if self._order is not None:
            # A column of zeros in front stands for padding.
            x_TD = torch.nn.functional.pad(x_TD, (1, 0)).index_select(1, self._order)
        steps = self._steps
        cut = FIXED_CUT
        if not self._is_fixed:
            cut = choose_cut(x_TD.shape[0], steps.values.shape[0], steps.groups.shape[0])
        return multiply(x_TD, steps, bias_E, dtype, cut)


def make_product(
    weight: IntegerWeight, *, has_byte_inputs: bool, is_fixed: bool
) -> IntegerProduct:
    """The product by a weight on a GPU."""
    return TritonIntegerProduct(weight, has_byte_inputs=has_byte_inputs, is_fixed=is_fixed)


def _regular_step(weight: IntegerWeight, inner: int) -> int:
    """The most columns that share a scale everywhere, if there are enough for matrix units; 0
    otherwise."""
    groups = weight.groups
    if groups.of_inputs is not None:
        return 0
    if groups.first + inner <= groups.size:
        # All inputs are in one group.
        common = inner
    else:
        common = math.gcd(groups.size, groups.first, inner)
    step = common & -common
    return min(step, _MAX_STEP) if step >= _MIN_STEP else 0


def _groups_of_steps(weight: IntegerWeight, inner: int, step: int) -> Tensor:
    numbers = weight.groups.numbers(inner, weight.values.device)
    return numbers[::step].to(torch.int32)


def _gathered(weight: IntegerWeight, inner: int) -> tuple[Tensor, Tensor, int]:
    """The input of each column plus one, 0 for padding; the group of each step; the step."""
    device = weight.values.device
    numbers = weight.groups.numbers(inner, torch.device("cpu"))
    order = torch.argsort(numbers, stable=True)
    found, counts = torch.unique_consecutive(numbers[order], return_counts=True)
    step = _MIN_STEP
    while step < _MAX_STEP and int(counts.median()) >= 2 * step:
        step *= 2
    columns, groups, start = [], [], 0
    for number, count in zip(found.tolist(), counts.tolist(), strict=True):
        inputs = order[start : start + count] + 1
        start += count
        columns.append(torch.nn.functional.pad(inputs, (0, -count % step)))
        groups += [number] * -(-count // step)
    steps = torch.tensor(groups, dtype=torch.int32, device=device)
    return torch.cat(columns).to(device), steps, step


def _steps_of(weight: IntegerWeight, order: Tensor | None, groups: Tensor, step: int) -> Steps:
    integers_EK = unpack(weight.values, weight.bits)
    if order is not None:
        integers_EK = integers_EK[:, (order - 1).clamp_min(0)]
    values = integers_EK.contiguous()
    if weight.bits == 4:
        halves = integers_EK.view(values.shape[0], -1, 2, step // 2)
        values = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).contiguous()
    scales, minimums = weight.scales.t().contiguous(), None
    if weight.minimums is not None:
        minimums = weight.minimums.t().contiguous()
    narrow = _narrowest([scales] if minimums is None else [scales, minimums])
    return Steps(
        values,
        scales.to(narrow),
        None if weight.zeros is None else weight.zeros.t().contiguous(),
        None if minimums is None else minimums.to(narrow),
        groups,
        step,
        weight.bits,
    )


def _narrowest(tensors: list[Tensor]) -> torch.dtype:
    """The narrowest dtype that holds every number exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(bool((each.to(dtype).float() == each).all()) for each in tensors):
            return dtype
    return torch.float32
