"""A quantized product that differs from its definition is not served."""

from __future__ import annotations

import pytest
import torch

from trimaran.comm.errors import ConfigError
from trimaran.kernels import integer_reference
from trimaran.kernels.build import load_library
from trimaran.kernels.byte_reference import ReferenceProduct, multiply_rows, quantize_weight
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.kernels.integers import Groups, IntegerWeight
from trimaran.kernels.quantized import BlockMap, ByteInputs, ByteRows, ByteWeight
from trimaran.kernels.reference import silu_and_mul
from trimaran.worker.quantization.self_check import check_integer_product, check_product


def weight_of(block):
    weight = torch.randn(200, 144, generator=torch.Generator().manual_seed(1))
    values, scales = quantize_weight(weight, block)
    rows = (torch.arange(200) // 64).to(torch.int32)
    return ByteWeight(values, scales, None if block is None else BlockMap(rows, block[1], 0))


def product_of(weight, inputs=None):
    return CpuOps(load_library(), torch.bfloat16, 1).fp8_product(weight, inputs or ByteInputs())


@pytest.mark.parametrize("block", [None, (64, 64)])
def test_a_correct_product_is_served(block):
    weight = weight_of(block)
    check_product(product_of(weight), weight, ByteInputs(), torch.bfloat16)


@pytest.mark.parametrize("block", [None, (64, 64)])
def test_a_wrong_scale_of_the_last_outputs_is_found(block):
    weight = weight_of(block)
    wrong = weight._replace(scales=weight.scales.clone())
    wrong.scales[-1] *= 1.5
    with pytest.raises(ConfigError, match=r"FP8 weights \[200, 144\] is .* % off"):
        check_product(product_of(wrong), weight, ByteInputs(), torch.bfloat16)


def test_scales_that_are_no_numbers_are_found_wherever_they_are():
    generator = torch.Generator().manual_seed(1)
    floats = torch.randn(400, 64, generator=generator)
    # Neither among the first outputs nor among the last, which are compared.
    floats[200, 5] = float("nan")
    ops = CpuOps(load_library(), torch.bfloat16, 1)
    fp8 = ByteWeight(*quantize_weight(floats))
    with pytest.raises(ConfigError, match=r"scales of FP8 weights \[400, 64\] are infinite"):
        check_product(product_of(fp8), fp8, ByteInputs(), torch.bfloat16)
    for bits, size in ((4, 32), (8, None)):
        values, scales = integer_reference.quantize_weight(floats, bits, size)
        weight = IntegerWeight(
            integer_reference.pack(values, bits), scales, Groups(size or 64), bits
        )
        with pytest.raises(ConfigError, match=rf"scales of INT{bits} weights"):
            check_integer_product(
                ops.integer_product(weight), weight, torch.bfloat16, has_byte_inputs=False
            )


def test_a_rank_with_padding_alone_is_served():
    weight = ByteWeight(torch.zeros(16, 144).to(torch.float8_e4m3fn), torch.zeros(16))
    check_product(product_of(weight), weight, ByteInputs(), torch.bfloat16)


class GroupedProduct(ReferenceProduct):
    """A product of rows with groups by another weight."""

    def __init__(self, weight, other):
        super().__init__(weight, ByteInputs())
        self._other = other

    def grouped_inputs(self, num_rows):
        return ByteInputs() if num_rows <= 16 else None

    def __call__(self, x_TD, bias_E=None):
        if isinstance(x_TD, ByteRows):
            return multiply_rows(x_TD, self._other)
        return super().__call__(x_TD, bias_E)


def test_a_wrong_product_of_groups_is_found():
    weight, other = (
        ByteWeight(
            *quantize_weight(
                torch.randn(16, 256, generator=torch.Generator().manual_seed(seed))
            )
        )
        for seed in (1, 2)
    )
    check_product(GroupedProduct(weight, weight), weight, ByteInputs(), torch.bfloat16)
    with pytest.raises(ConfigError, match=r"a product of 1 tokens .* % off"):
        check_product(GroupedProduct(weight, other), weight, ByteInputs(), torch.bfloat16)


class GatedProduct(ReferenceProduct):
    """A product whose SwiGLU multiplies by another weight."""

    def __init__(self, weight, other):
        super().__init__(weight, ByteInputs())
        self._other = ReferenceProduct(other, ByteInputs())

    def gated(self, x_TD):
        return silu_and_mul(self._other(x_TD))


@pytest.mark.parametrize("output", [99, 199])
def test_a_wrong_swiglu_is_found(output):
    weight = weight_of(None)
    wrong = weight._replace(scales=weight.scales.clone())
    wrong.scales[output] *= 1.5
    right = GatedProduct(weight, weight)
    check_product(right, weight, ByteInputs(), torch.bfloat16, is_gated=True)
    product = GatedProduct(weight, wrong)
    check_product(product, weight, ByteInputs(), torch.bfloat16)
    with pytest.raises(ConfigError, match=r"SwiGLU of 16 tokens by FP8 weights .* % off"):
        check_product(product, weight, ByteInputs(), torch.bfloat16, is_gated=True)


class PartsProduct(ReferenceProduct):
    """A product in two parts, the second by another weight, of as many tokens as
    ``num_rows``."""

    def __init__(self, weight, other, num_rows):
        super().__init__(weight, ByteInputs())
        self._other = ReferenceProduct(other, ByteInputs())
        self._num_rows = num_rows

    def parts(self, x_TD):
        if x_TD.shape[0] != self._num_rows:
            return None
        return torch.stack((0.5 * self(x_TD), 0.5 * self._other(x_TD)))


@pytest.mark.parametrize("num_rows", [1, 160])
def test_wrong_parts_are_found(num_rows):
    weight = weight_of(None)
    wrong = weight._replace(scales=3 * weight.scales)
    right = PartsProduct(weight, weight, num_rows)
    check_product(right, weight, ByteInputs(), torch.bfloat16)
    product = PartsProduct(weight, wrong, num_rows)
    with pytest.raises(ConfigError, match=rf"of {num_rows} tokens by FP8 weights .* % off"):
        check_product(product, weight, ByteInputs(), torch.bfloat16)
