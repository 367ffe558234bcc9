"""Products of few rows in Triton's interpreter: those of the plain twin."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels import reference
from trimaran.kernels.triton.skinny import can_stream, row_products, stream_gated, stream_parts


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize(("outputs", "inner"), [(64, 512), (192, 1024)])
def test_partial_sums_add_up_to_the_product(rows, outputs, inner):
    generator = torch.Generator().manual_seed(outputs)
    x = torch.randn(rows, inner + 16, generator=generator).half()[:, :inner]
    weight = torch.randn(outputs, inner, generator=generator).half() / 16

    parts = stream_parts(x, weight)

    assert parts.dtype == torch.float32
    torch.testing.assert_close(parts.sum(0), x.float() @ weight.float().T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 9])
def test_the_gated_product_is_that_of_the_plain_twin(rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 256, generator=generator).half()
    weight = torch.randn(2 * 128, 256, generator=generator).half() / 16
    expected = reference.silu_and_mul(reference.linear(x.float(), weight.float()))

    actual = stream_gated(x, weight)

    torch.testing.assert_close(actual.float(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(("rows", "outputs", "inner"), [(1, 8, 256), (2, 60, 200)])
def test_router_logits_of_the_skinny_kernel_are_not_rounded(rows, outputs, inner):
    generator = torch.Generator().manual_seed(outputs)
    x = torch.randn(rows, inner + 8, generator=generator).half()[:, :inner]
    weight = torch.randn(outputs, inner, generator=generator).half()

    found = row_products(x, weight)

    assert found.dtype == torch.float32
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


def test_only_large_weights_that_fit_the_tiles_are_streamed():
    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    assert can_stream(1, weight(4096, 4096), is_gated=False)
    assert can_stream(16, weight(28672, 4096), is_gated=True)
    assert not can_stream(17, weight(4096, 4096), is_gated=False)
    assert not can_stream(1, weight(1024, 4096), is_gated=False)
    assert not can_stream(1, weight(4096, 4096 + 128), is_gated=False)
    assert not can_stream(1, weight(28672 + 64, 4096), is_gated=True)
