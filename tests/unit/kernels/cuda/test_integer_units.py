"""Units of integer weights: threads of the Hopper kernel find their fragments of the weight."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels.cuda.integer_experts import pack_experts
from trimaran.kernels.cuda.integer_units import can_pack, can_pack_fp4, pack_units
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


def fp4_weight(outputs=72, inner=288):
    generator = torch.Generator().manual_seed(outputs)
    values = torch.randint(0, 256, (outputs, inner // 2), generator=generator)
    exponents = torch.randint(-30, 17, (outputs, inner // 32), generator=generator)
    groups, scales = Groups(32), torch.exp2(exponents.float())
    return IntegerWeight(values.to(torch.uint8), scales, groups, 4, is_fp4=True)


def fp4_fragments(units):
    """The weight as the threads of the kernel make it, by the shifts and masks of
    ``fp4_units.cuh``, over the kernel's divisor."""
    tiles, steps, _ = units.values.shape
    words, exponents = units.values.split((4096, 256), 2)
    words = words.contiguous().view(torch.int32).view(tiles, steps, 2, 128, 4)
    words = words.transpose(2, 3).reshape(tiles, steps, 128, 8).to(torch.int64) & 0xFFFFFFFF
    exponents = exponents.reshape(tiles, steps, 32, 2, 4).to(torch.int64)
    signs, bits = 0x80008000, 0x01C001C0
    thread = torch.arange(128)
    warp, lane, pair = thread // 32, thread % 32, thread // 4
    found = torch.zeros(tiles, 64, steps, 128)
    for step in range(8):
        word = words[..., step]
        registers = (
            word & (signs | bits),
            word << 3 & bits | word << 1 & signs,
            word << 6 & (signs | bits),
            word >> 4 & bits | word << 2 & signs,
        )
        # Bytes are groups 0, 2, 1 and 3.
        group = (0, 2, 1, 3)[step // 2]
        for register, numbers in enumerate(registers):
            scale = (exponents[:, :, pair, register % 2, group] << 23).to(torch.int32)
            for half in range(2):
                number = (numbers >> 16 * half & 0xFFFF) << 16
                number = torch.where(number >= 1 << 31, number - (1 << 32), number)
                value = number.to(torch.int32).view(torch.float32) * scale.view(torch.float32)
                output = 16 * warp + lane // 4 + 8 * (register % 2)
                column = 16 * step + 2 * (lane % 4) + 8 * (register // 2) + half
                found[:, output, :, column] = value.permute(2, 0, 1)
    return found.view(tiles * 64, -1)


def test_threads_make_fp4_numbers_of_their_codes():
    weight = fp4_weight()
    units = pack_units(weight, Columns.of(weight))
    assert units.unit_bytes == 4096 + 256
    found = fp4_fragments(units)[:72, :288] * 65536
    assert found.equal(dequantize(weight))
    assert found.unique().numel() > 100


def test_fp4_scales_outside_of_the_exact_range_and_other_groups_are_not_packed():
    weight = fp4_weight()
    columns = Columns.of(weight)
    assert can_pack_fp4(weight, columns)
    assert not can_pack_fp4(weight._replace(scales=weight.scales * 1.5), columns)
    assert not can_pack_fp4(weight._replace(scales=weight.scales * 4), columns)
    assert not can_pack_fp4(weight._replace(scales=weight.scales * 2.0**-80), columns)
    narrow = weight._replace(groups=Groups(16), scales=weight.scales.repeat(1, 2))
    assert not can_pack_fp4(narrow, Columns.of(narrow))


def test_gates_and_ups_of_experts_share_warps(monkeypatch):
    monkeypatch.setattr("trimaran.kernels.cuda.integer_experts.Variant.compile", lambda _: b"")
    weights = [fp4_weight(80, 64), fp4_weight(80, 64)]
    packed = pack_experts(weights, torch.bfloat16, is_gated=True)
    assert packed is not None and packed.packing is not None
    assert packed.num_outputs == 80 and packed.values.shape[:3] == (2, 2, 1)
    units = pack_units(weights[0], Columns.of(weights[0]))
    found = fp4_fragments(units._replace(values=packed.values[0]))[:, :64] * 65536
    expected = dequantize(weights[0])
    rows = torch.arange(128)
    result = rows // 16 * 8 + rows % 8
    is_up, is_real = rows % 16 >= 8, result < 40
    assert found[is_real & ~is_up].equal(expected[:40])
    assert found[is_real & is_up].equal(expected[40:])


def test_experts_that_units_do_not_hold_are_left_to_triton():
    weights = [fp4_weight(80, 64)]
    assert pack_experts(weights, torch.float16, is_gated=True) is None
    assert pack_experts([fp4_weight(84, 64)], torch.bfloat16, is_gated=True) is None
    ordered = weight_of("4-bits-order")
    assert pack_experts([ordered], torch.bfloat16, is_gated=False) is None
