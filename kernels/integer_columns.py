"""The columns of an integer weight in the order of the GPU's kernels: groups one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trimaran.kernels.integer_reference import unpack
from trimaran.kernels.integers import IntegerWeight

# Shapes: T tokens, D inner width, K columns with padding, S steps.

_MAX_STEP = 128
_MIN_STEP = 32


class Columns(NamedTuple):
    """Inputs of a weight in steps of columns that share a scale."""

    order: Tensor | None
    """int64 [K]: the input of each column plus one, 0 for padding; None: inputs as they are."""

    groups: Tensor
    """int32 [S]: the group of each step."""

    step: int
    """Columns of a step: 32, 64 or 128."""

    @classmethod
    def of(cls, weight: IntegerWeight) -> Columns:
        """The columns of a weight, gathered unless groups are cut at multiples of a step."""
        inner = weight.shape[1]
        step = _regular_step(weight, inner)
        if not step:
            return _gathered(weight, inner)
        numbers = weight.groups.numbers(inner, weight.values.device)
        return cls(None, numbers[::step].to(torch.int32), step)

    @classmethod
    def of_experts(cls, weights: Sequence[IntegerWeight]) -> list[Columns]:
        """The columns of matrices of one shape: all are gathered or none, in the same number of
        equal steps, of which the last may be padding alone."""
        found = [cls.of(each) for each in weights]
        step = min(each.step for each in found)
        if all(each.order is None and each.step == step for each in found):
            return found
        inner = weights[0].shape[1]
        found = [_gathered(each, inner, step) for each in weights]
        longest = max(len(each.groups) for each in found)
        return [each._padded(longest) for each in found]

    def _padded(self, num_steps: int) -> Columns:
        missing = num_steps - len(self.groups)
        assert self.order is not None
        order = torch.nn.functional.pad(self.order, (0, missing * self.step))
        return Columns(order, torch.nn.functional.pad(self.groups, (0, missing)), self.step)

    def gather(self, x_TD: Tensor) -> Tensor:
        """The inputs of the columns [T, K]; zeros for padding."""
        if self.order is None:
            return x_TD
        # A column of zeros in front stands for padding.
        return torch.nn.functional.pad(x_TD, (1, 0)).index_select(1, self.order)

    def arrange(self, integers_ED: Tensor) -> Tensor:
        """Integers of the columns [E, K]; those of padding are arbitrary."""
        if self.order is None:
            return integers_ED
        return integers_ED[:, (self.order - 1).clamp_min(0)]

    def packed(self, weight: IntegerWeight) -> Tensor:
        """Integers of the columns, uint8 [E, K], or for 4 bits [E, K / 2]: the halves of a step
        share bytes, the first half being the low one."""
        values = self.arrange(unpack(weight.values, weight.bits)).contiguous()
        if weight.bits == 8:
            return values
        halves = values.view(values.shape[0], -1, 2, self.step // 2)
        return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).contiguous()


def narrowest(tensors: list[Tensor]) -> torch.dtype:
    """The narrowest dtype that holds every number exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(bool((each.to(dtype).float() == each).all()) for each in tensors):
            return dtype
    return torch.float32


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


def _gathered(weight: IntegerWeight, inner: int, step: int = 0) -> Columns:
    """Columns by groups, in steps of ``step`` or as many as suit the groups."""
    device = weight.values.device
    numbers = weight.groups.numbers(inner, torch.device("cpu"))
    order = torch.argsort(numbers, stable=True)
    found, counts = torch.unique_consecutive(numbers[order], return_counts=True)
    largest = step or _MAX_STEP
    step = step or _MIN_STEP
    while step < largest and int(counts.median()) >= 2 * step:
        step *= 2
    columns, groups, start = [], [], 0
    for number, count in zip(found.tolist(), counts.tolist(), strict=True):
        inputs = order[start : start + count] + 1
        start += count
        columns.append(torch.nn.functional.pad(inputs, (0, -count % step)))
        groups += [number] * -(-count // step)
    steps = torch.tensor(groups, dtype=torch.int32, device=device)
    return Columns(torch.cat(columns).to(device), steps, step)
