"""INT8 inputs and products in Triton's interpreter: those of the plain twins, to the bit."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels import byte_reference, integer_reference
from trimaran.kernels.byte_products import FIXED_TILE, GpuByteProduct
from trimaran.kernels.quantized import INT8, ByteInputs, ByteWeight
from trimaran.kernels.triton import byte_rows, elementwise, norm
from trimaran.kernels.triton.byte_gemm import Inputs, Tile, multiply_stream, multiply_tiles
from trimaran.kernels.triton.byte_inputs import quantize_tokens

INPUTS = {
    "token": ByteInputs(dtype=INT8),
    "static": ByteInputs(scale=torch.tensor(0.03), dtype=INT8),
}


def drawn(rows, inner, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, inner), generator=generator)
    return (x * torch.logspace(-2, 1, rows)[:, None]).to(dtype)


def weight_of(outputs, inner):
    generator = torch.Generator().manual_seed(outputs)
    values = torch.randint(-128, 128, (outputs, inner), generator=generator).to(torch.int8)
    return ByteWeight(values, torch.rand(outputs, generator=generator) / 64)


def same(found, expected):
    """Whether two pairs of values and scales are equal to the bit."""
    assert found[0].dtype is torch.int8 and found[0].equal(expected[0])
    assert found[1].equal(expected[1].reshape(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("inner", [96, 136])
def test_tokens_are_quantized_as_by_the_twin(name, inner, dtype):
    x, inputs = drawn(7, inner + 8, dtype)[:, :inner], INPUTS[name]
    x[4] = 0
    # Halves between two integers, whose scale is one.
    x[5] = torch.arange(inner) - 0.5
    x[5, 0] = 127.0
    x[5].clamp_(-127.0, 127.0)
    same(quantize_tokens(x, inputs), integer_reference.quantize_inputs(x, inputs.scale))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", INPUTS)
def test_a_token_that_is_no_number_has_a_scale_that_is_none_either(name, value):
    x = drawn(3, 64)
    x[1, 5] = value
    scales = quantize_tokens(x, INPUTS[name])[1]
    expected = integer_reference.quantize_inputs(x, INPUTS[name].scale)[1].reshape(-1)
    torch.testing.assert_close(scales, expected, rtol=0, atol=0, equal_nan=True)
    assert not bool(scales[1].isfinite()) and bool(scales[::2].isfinite().all())


@pytest.mark.parametrize("name", INPUTS)
def test_norms_and_activations_make_the_rows_of_separate_kernels(name):
    inputs, x, factor = INPUTS[name], drawn(5, 200), drawn(1, 200, seed=2)[0]
    same(
        byte_rows.rms_norm(x, None, factor, 1e-5, inputs)[:2],
        quantize_tokens(norm.rms_norm(x, factor, 1e-5), inputs),
    )
    gate_up = drawn(5, 400, seed=3)
    same(
        byte_rows.gated_activation(gate_up, "silu", inputs)[:2],
        quantize_tokens(elementwise.gated_activation(gate_up, "silu"), inputs),
    )


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("rows", "outputs", "inner"), [(1, 128, 256), (21, 136, 208)])
def test_products_add_up_integers_exactly(rows, outputs, inner, has_bias):
    weight, x = weight_of(outputs, inner), drawn(rows, inner, torch.float32)
    bias = torch.randn(outputs) if has_bias else None
    quantized = Inputs(*quantize_tokens(x, INPUTS["token"]))
    totals = quantized.values.long() @ weight.values.long().T
    exact = totals.float() * (quantized.scales[:, None] * weight.scales)
    exact = exact if bias is None else exact + bias
    tiles = [
        multiply_tiles(quantized, weight, bias, x.dtype, Tile(16, columns, 32))
        for columns in (16, 32)
    ]
    streams = [
        multiply_stream(quantized, weight, bias, x.dtype, Tile(32, 32, 32, parts))
        for parts in (1, 3, 3)
    ]
    for found in (*tiles, *streams):
        assert found.equal(exact)


@pytest.mark.parametrize("is_fixed", [True, False])
@pytest.mark.parametrize("rows", [0, 3, 70])
@pytest.mark.parametrize("name", INPUTS)
def test_the_product_of_a_weight_is_that_of_the_twin(name, rows, is_fixed):
    weight, x, inputs = weight_of(192, 256), drawn(rows, 256), INPUTS[name]
    found = GpuByteProduct(weight, inputs, is_fixed=is_fixed)(x)
    expected = byte_reference.ReferenceProduct(weight, inputs)(x)
    # The order of the scales may move a sum to the next bf16 number.
    torch.testing.assert_close(found, expected, atol=0.0, rtol=2**-7)


def test_all_cuts_make_the_same_bits():
    weight, x = weight_of(136, 208), drawn(70, 208)
    quantized = Inputs(*quantize_tokens(x, INPUTS["token"]))
    whole = multiply_tiles(quantized, weight, None, x.dtype, FIXED_TILE)
    few = Inputs(quantized.values[:9], quantized.scales[:9])
    assert multiply_stream(few, weight, None, x.dtype, Tile(16, 32, 64, 2)).equal(whole[:9])
