"""Products by integer weights in Triton's interpreter: those of the plain twin."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels.integer_products import FIXED_CUT, TritonIntegerProduct, choose_cut
from trimaran.kernels.integer_reference import ReferenceIntegerProduct, pack
from trimaran.kernels.integers import Groups, IntegerWeight
from trimaran.kernels.triton.integer_gemm import Cut, multiply

CASES = {
    "4-bits": (4, 64, "", ""),
    "4-bits-zeros": (4, 32, "zeros", ""),
    "4-bits-minimums": (4, 32, "minimums", ""),
    "4-bits-cut-groups": (4, 128, "zeros", "cut"),
    "4-bits-order": (4, 64, "zeros", "order"),
    "4-bits-small-groups": (4, 24, "zeros", ""),
    "8-bits-rows": (8, 256, "", ""),
    "8-bits-zeros": (8, 64, "zeros", ""),
    "8-bits-minimums": (8, 32, "minimums", ""),
}


def weight_of(name, outputs=72, inner=256):
    bits, size, extra, order = CASES[name]
    generator = torch.Generator().manual_seed(outputs)
    integers = torch.randint(0, 1 << bits, (outputs, inner), generator=generator)
    groups = Groups(size, size // 2 if order == "cut" else 0)
    numbers = groups.numbers(inner, integers.device)
    if order == "order":
        mixed = numbers[torch.randperm(inner, generator=generator)]
        groups = groups._replace(of_inputs=mixed.to(torch.int32))
    shape = outputs, int(numbers.max()) + 1
    zeros = torch.randint(1, 1 << bits, shape, generator=generator, dtype=torch.int16)
    return IntegerWeight(
        pack(integers.to(torch.uint8), bits),
        torch.rand(shape, generator=generator) / (4 << bits),
        groups,
        bits,
        zeros if extra == "zeros" else None,
        torch.rand(shape, generator=generator) - 0.5 if extra == "minimums" else None,
    )


@pytest.mark.parametrize("inputs", ["floats", "bytes", "static bytes"])
@pytest.mark.parametrize("name", list(CASES))
def test_products_are_those_of_the_twin(name, inputs):
    weight, has_byte_inputs = weight_of(name), inputs != "floats"
    if inputs == "static bytes":
        weight = weight._replace(input_scale=torch.tensor(0.02))
    x = torch.randn((5, 264), generator=torch.Generator().manual_seed(1)).half()[:, :256]
    bias = torch.randn(72).half()
    product = TritonIntegerProduct(weight, has_byte_inputs=has_byte_inputs, is_fixed=False)
    twin = ReferenceIntegerProduct(weight, has_byte_inputs=has_byte_inputs)

    found, expected = product(x, bias), twin(x, bias)

    torch.testing.assert_close(found, expected, atol=1e-2, rtol=2e-3)


@pytest.mark.parametrize(("size", "first"), [(96, 64), (128, 64), (192, 0)])
def test_a_group_may_be_larger_than_the_inputs_of_a_rank(size, first):
    generator = torch.Generator().manual_seed(size)
    groups = Groups(size, first)
    count = int(groups.numbers(64, torch.device("cpu")).max()) + 1
    integers = torch.randint(0, 16, (72, 64), generator=generator).to(torch.uint8)
    scales = torch.rand((72, count), generator=generator) / 64
    weight = IntegerWeight(pack(integers, 4), scales, groups, 4)
    x = torch.randn((5, 64), generator=generator).half()
    product = TritonIntegerProduct(weight, has_byte_inputs=False, is_fixed=False)
    twin = ReferenceIntegerProduct(weight, has_byte_inputs=False)
    torch.testing.assert_close(product(x), twin(x), atol=1e-2, rtol=2e-3)


@pytest.mark.parametrize("parts", [1, 3])
def test_programs_that_share_a_tile_leave_the_sums_of_one(parts):
    weight = weight_of("4-bits-zeros")
    x = torch.randn((20, 256), generator=torch.Generator().manual_seed(1)).half()
    steps = TritonIntegerProduct(weight, has_byte_inputs=False, is_fixed=False)._steps
    expected = ReferenceIntegerProduct(weight, has_byte_inputs=False)(x)
    for _ in range(2):
        found = multiply(x, steps, None, x.dtype, Cut(16, 32, parts))
        torch.testing.assert_close(found, expected, atol=1e-2, rtol=2e-3)


def test_a_row_of_a_fixed_cut_does_not_depend_on_other_rows():
    weight = weight_of("4-bits-order")
    x = torch.randn((70, 256), generator=torch.Generator().manual_seed(1)).half()
    product = TritonIntegerProduct(weight, has_byte_inputs=False, is_fixed=True)
    assert product(x[:1]).equal(product(x)[:1])
    assert FIXED_CUT.parts == 1


@pytest.mark.parametrize(("outputs", "parts"), [(4096, 4), (28672, 1), (6144, 2)])
def test_products_with_few_outputs_are_split_between_more_programs(outputs, parts):
    assert choose_cut(1, outputs, 32).parts == parts
