"""Sums with norms in a group of one GPU: the bits of the norm, at every width."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels.cuda.sum_norm import DTYPES, SumNorm, region_bytes
from trimaran.kernels.triton.norm import rms_norm

pytestmark = pytest.mark.gpu

EPS, MAX_ROWS = 1e-5, 64
ROWS = [
    (dtype, width)
    for dtype in DTYPES
    for width in (256, 512, 1000, 1024, 2048, 2880, 4096, 5120, 8192)
    if dtype.itemsize * width <= 16 << 10
]


@pytest.fixture(scope="module")
def sum_norm():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"there is no kernel for {torch.cuda.get_device_name()}")
    device = torch.device("cuda", torch.cuda.current_device())
    region = torch.zeros(region_bytes(1, MAX_ROWS), dtype=torch.uint8, device=device)
    return SumNorm([region.data_ptr()], 0, MAX_ROWS, device, region)


@pytest.mark.parametrize(("dtype", "width"), ROWS, ids=str)
def test_norms_have_the_bits_of_the_norm_alone(sum_norm, dtype, width):
    generator = torch.Generator("cuda").manual_seed(width)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    weight = draw(width)
    for rows in (1, 3, MAX_ROWS):
        x, residual = draw(rows, width), draw(rows, width)
        assert sum_norm.takes(residual)
        added = residual.clone()
        expected = rms_norm(x, weight, EPS, added)

        normed = sum_norm(x, residual, weight, EPS)

        assert torch.equal(residual, added)
        assert torch.equal(normed, expected)
