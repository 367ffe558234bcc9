"""Products left in parts: they add up to the product."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels.products import num_parts, split_product

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 64, 65, 256, 8192])
def test_partial_sums_of_a_product_add_up_to_the_product(rows, dtype):
    x = torch.randn(rows, 768, device=DEVICE).to(dtype)[:, 128:]
    weight = torch.randn(96, 640, device=DEVICE).to(dtype)
    parts = num_parts(rows, *weight.shape)

    actual = split_product(x, weight, parts)

    assert actual.shape == (parts, rows, 96)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(actual.sum(0).double(), exact, atol=1e-3, rtol=1e-4)


def test_products_of_many_tiles_are_not_split():
    assert num_parts(1, 4096, 14336) == 4
    assert num_parts(256, 4096, 4096) == 2
    assert num_parts(257, 4096, 4096) == 1
    assert num_parts(1, 28672, 4096) == 1
    assert num_parts(1, 4096, 4100) == 1
