"""Units of integer weights: threads of the Hopper kernel find their fragments of the weight."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels.cuda.integer_units import can_pack, pack_units
from trimaran.kernels.integer_columns import Columns
from trimaran.kernels.integer_reference import dequantize
from trimaran.kernels.integers import Groups, IntegerWeight

CASES = {
    "4-bits": (4, 128, "", 64, 256),
    "4-bits-ragged": (4, 64, "zeros", 100, 320),
    "4-bits-small-groups": (4, 32, "zeros", 64, 96),
    "4-bits-order": (4, 128, "order", 72, 256),
    "8-bits-rows": (8, 208, "", 64, 208),
    "8-bits-zeros": (8, 128, "zeros", 70, 256),
    "8-bits-float32-scales": (8, 64, "float32", 64, 128),
}


def weight_of(name):
    bits, size, extra, outputs, inner = CASES[name]
    generator = torch.Generator().manual_seed(outputs)
    values = torch.randint(0, 256, (outputs, inner * bits // 8), generator=generator)
    groups = Groups(size)
    numbers = groups.numbers(inner, values.device)
    if extra == "order":
        mixed = numbers[torch.randperm(inner, generator=generator)]
        groups = groups._replace(of_inputs=mixed.to(torch.int32))
    shape = outputs, int(numbers.max()) + 1
    scales = torch.rand(shape, generator=generator)
    zeros = torch.randint(1, (1 << bits) + (bits == 4), shape, generator=generator)
    return IntegerWeight(
        values.to(torch.uint8),
        scales if extra == "float32" else scales.half().float(),
        groups,
        bits,
        zeros.to(torch.int16) if extra in ("zeros", "order") else None,
    )


def fragments(units):
    """The weight as the threads of the kernel see it, register by register."""
    tiles, steps, _ = units.values.shape
    words_bytes = 4096 * units.bits // 4
    words, rest = units.values.split((words_bytes, units.unit_bytes - words_bytes), 2)
    # A thread loads four words at a time, beside the other 127 threads.
    words = words.contiguous().view(torch.int32).view(tiles, steps, -1, 128, 4)
    words = words.transpose(2, 3).reshape(tiles, steps, 128, 8, -1).to(torch.int64)
    dtype = (torch.bfloat16, torch.float16, torch.float32)[units.scales]
    scale_bytes = units.groups * 64 * dtype.itemsize
    scales = rest[..., :scale_bytes].contiguous().view(dtype)
    scales = scales.view(tiles, steps, units.groups, 32, 2).float()
    zeros = torch.full_like(scales, 1 << (units.bits - 1))
    if units.has_zeros:
        zeros = rest[..., scale_bytes:].contiguous().view(torch.int16).view_as(scales).float()
    thread = torch.arange(128)
    warp, lane, pair = thread // 32, thread % 32, thread // 4
    found = torch.zeros(tiles, 64, steps, 128)
    for step in range(8):
        group = step * units.groups // 8
        for register in range(4):
            for half in range(2):
                word = words[..., step, register // 2 if units.bits == 8 else 0]
                shift = 4 * register + 16 * half
                if units.bits == 8:
                    shift = 16 * half + 8 * (register % 2)
                integers = (word >> shift) & ((1 << units.bits) - 1)
                output = 16 * warp + lane // 4 + 8 * (register % 2)
                column = 16 * step + 2 * (lane % 4) + 8 * (register // 2) + half
                zero = zeros[:, :, group, pair, register % 2]
                value = (integers - zero) * scales[:, :, group, pair, register % 2]
                found[:, output, :, column] = value.permute(2, 0, 1)
    return found.view(tiles * 64, -1)


@pytest.mark.parametrize("name", list(CASES))
def test_threads_find_the_weight(name):
    weight = weight_of(name)
    columns = Columns.of(weight)
    units = pack_units(weight, columns)
    outputs, inner = weight.shape
    found = fragments(units)[:outputs]
    expected = dequantize(weight)
    if columns.order is None:
        assert found[:, :inner].equal(expected)
        return
    for column, place in enumerate(columns.order.tolist()):
        if place:
            assert found[:, column].equal(expected[:, place - 1])


def test_zero_points_outside_of_the_range_and_minimums_are_not_packed():
    weight = weight_of("4-bits-ragged")
    assert can_pack(weight)
    assert weight.zeros is not None
    assert not can_pack(weight._replace(zeros=weight.zeros - 20))
    assert not can_pack(weight._replace(zeros=weight.zeros + 200))
    assert not can_pack(weight._replace(zeros=None, minimums=weight.scales))
