"""Rounding by the inputs of a product has less error than rounding to the nearest."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels import byte_reference
from trimaran.kernels.integer_reference import quantize_weight
from trimaran.worker.quantization.calibrated_rounding import (
    fit_integers,
    fp8_scales,
    integer_scales,
    round_to_inputs,
)

OUTPUTS, INNER, TOKENS = 24, 192, 1024


@pytest.fixture
def weight():
    return torch.randn(OUTPUTS, INNER, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def inputs():
    """Inputs that depend on each other, some of them large."""
    generator = torch.Generator().manual_seed(2)
    causes = torch.randn(TOKENS, INNER // 4, generator=generator)
    mixed = causes @ torch.randn(INNER // 4, INNER, generator=generator)
    sizes = torch.logspace(-1, 1, INNER)
    return (mixed + torch.randn(mixed.shape, generator=generator)) * sizes


def floats_of(integers, scales, bits, size):
    spread = scales.repeat_interleave(size or INNER, 1)[:, :INNER]
    return (integers.float() - (1 << (bits - 1))) * spread


def error(inputs, weight, rounded):
    return float((inputs @ (rounded - weight).T).square().mean())


@pytest.mark.parametrize(("bits", "size"), [(4, 64), (4, 80), (8, None)])
def test_fitted_integers_change_products_less_than_the_nearest(weight, inputs, bits, size):
    nearest = floats_of(*quantize_weight(weight, bits, size), bits, size)
    integers, scales = fit_integers(weight, bits, size, inputs.T @ inputs)
    assert integers.dtype is torch.uint8 and int(integers.max()) < 1 << bits
    assert scales.equal(scales.bfloat16().float())
    fitted = floats_of(integers, scales, bits, size)
    assert error(inputs, weight, fitted) < 0.4 * error(inputs, weight, nearest)


def test_fitted_fp8_changes_products_less_than_the_nearest(weight, inputs):
    values, scales = byte_reference.quantize_weight(weight)
    nearest = values.float() * scales[:, None]

    def grid(floats, scales):
        return byte_reference.to_fp8(floats, scales).float() * scales

    spread = scales[:, None].expand_as(weight)
    fitted = round_to_inputs(weight, inputs.T @ inputs, spread, grid)
    again = byte_reference.to_fp8(fitted, spread)
    assert (again.float() * spread).equal(fitted)
    assert error(inputs, weight, fitted) < 0.4 * error(inputs, weight, nearest)


def test_inputs_that_the_text_never_has_are_rounded_to_the_nearest(weight, inputs):
    inputs[:, 7] = 0.0
    integers, scales = fit_integers(weight, 4, 64, inputs.T @ inputs)
    expected = (weight[:, 7] / scales[:, 0]).round().clamp(-8, 7) + 8
    assert integers[:, 7].equal(expected.to(torch.uint8))


def test_searched_scales_leave_no_larger_error_than_the_largest_magnitude(weight):
    counts = torch.linspace(0.1, 2.0, INNER)
    integers, scales = quantize_weight(weight, 4, 64)
    plain = floats_of(integers, scales, 4, 64)
    found = integer_scales(weight, 4, 64, counts).repeat_interleave(64, 1)
    searched = (weight / found).round().clamp(-8, 7) * found
    errors = [((each - weight).square() * counts).sum(1) for each in (searched, plain)]
    assert bool((errors[0] <= errors[1]).all()) and bool((errors[0] < errors[1]).any())


@pytest.mark.parametrize("block", [None, (16, 80)])
def test_searched_fp8_scales_leave_no_larger_error_than_the_largest_magnitude(weight, block):
    counts = torch.linspace(0.1, 2.0, INNER)
    plain = byte_reference.quantize_weight(weight, block)[1]
    found = fp8_scales(weight, block, counts)
    assert found.shape == plain.shape and found.equal(found.bfloat16().float())
    assert bool((found >= plain).all()) and bool((found < 2 * plain).all())
    errors = []
    for scales in (found, plain):
        spread = byte_reference.spread_scales(scales, (OUTPUTS, INNER), block)
        rounded = byte_reference.to_fp8(weight, spread).float() * spread
        errors.append(((rounded - weight).square() * counts).sum())
    assert errors[0] < 0.99 * errors[1]
