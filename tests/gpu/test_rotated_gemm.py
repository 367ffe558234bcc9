"""Query, key and value products that rotate and store, against a product and a rotation."""

from __future__ import annotations

import random

import pytest
import torch

from trimaran.kernels import triton_rotary
from trimaran.kernels.hopper_gemm import HopperGemm
from trimaran.kernels.product_table import GemmShape, ProductTable
from trimaran.kernels.products import HopperProducts
from trimaran.kernels.rotated_gemm import RotatedGemm, takes

DEVICE = torch.device("cuda")
HEAD = 128
CUTS = [
    GemmShape(256, 128, 1, 2), GemmShape(256, 128), GemmShape(128, 256, 1, 2),
    GemmShape(128, 128, 1, 4), GemmShape(64, 128), GemmShape(192, 128, 1, 2),
    GemmShape(128, 256, 1, 2, shares_weights=True),
    GemmShape(256, 128, 1, 2, shares_weights=True),
]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16]

pytestmark = pytest.mark.gpu


class Layer:
    """A layer's weight and cache, and tokens in a drawn order of slots."""

    def __init__(self, rows, queries, keys, inner, block_size, dtype):
        generator = torch.Generator(DEVICE).manual_seed(rows + inner)

        def drawn(*size):
            return torch.randn(size, generator=generator, device=DEVICE)

        self.x = drawn(rows, inner).to(dtype)
        self.weight = (drawn((queries + 2 * keys) * HEAD, inner) * inner**-0.5).to(dtype)
        # A layer of several, the tokens of a head side by side.
        blocks = rows // block_size + 3
        pool = drawn(blocks, 3, 2, keys, block_size, HEAD).to(dtype)
        self.cache = pool[:, 1].transpose(2, 3)
        self.slots = torch.randperm(blocks * block_size, device=DEVICE)[:rows]
        self.positions = torch.randint(0, 900, (rows,), device=DEVICE)
        self.angles = drawn(900, HEAD)

    def apart(self, cut):
        """Queries and cache by a product, and then a rotation."""
        product = HopperGemm(cut, self.x.dtype, DEVICE)(self.x, self.weight)
        heads, cache = product.view(len(self.x), -1, HEAD), self._copied()
        triton_rotary.rope_and_cache(heads, self.angles, self.positions, cache, self.slots)
        return heads[:, : -2 * cache.shape[3]], cache

    def together(self, kernel):
        """The same by one kernel."""
        cache = self._copied()
        # Poison where the allocator will put the queries.
        torch.full_like(self.x @ self.weight.T, float("nan"))
        queries = kernel.rotated(
            self.x, self.weight, self.angles, self.positions, cache, self.slots
        )
        return queries, cache

    def _copied(self):
        whole = self.cache.transpose(2, 3).contiguous()
        return whole.transpose(2, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_cut_gives_the_bits_of_a_product_and_a_rotation(cut, dtype):
    kernel = RotatedGemm(cut, dtype, DEVICE)
    draw = random.Random(str(cut))
    for queries, keys in [(32, 8), (4, 4), (7, 1), (6, 2)]:
        layer = Layer(
            draw.randint(1, 1500), queries, keys, 8 * draw.randint(8, 256),
            draw.choice([8, 16, 32, 64]), dtype,
        )  # fmt: skip

        found_queries, found_cache = layer.together(kernel)

        expected_queries, expected_cache = layer.apart(cut)
        assert found_queries.equal(expected_queries)
        # With what nobody wrote.
        assert found_cache.equal(expected_cache)


def test_a_step_of_the_8b_shape_is_one_kernel_where_that_was_measured():
    layer = Layer(4096, 32, 8, 4096, 32, torch.bfloat16)
    products = HopperProducts(DEVICE, torch.bfloat16)
    arguments = layer.weight, layer.angles, layer.positions, layer.cache, layer.slots

    assert products.rotated_linear(layer.x, *arguments) is not None
    # Graphs hold steps of few tokens.
    few = layer.x[:512]
    assert products.rotated_linear(few, *arguments) is None
    fixed = HopperProducts(DEVICE, torch.bfloat16, is_deterministic=True)
    assert fixed.rotated_linear(layer.x, *arguments) is None
    nothing = HopperProducts(DEVICE, torch.bfloat16, table=ProductTable({}))
    assert nothing.rotated_linear(layer.x, *arguments) is None


def test_other_heads_angles_and_caches_are_left_to_others():
    layer = Layer(64, 4, 2, 256, 16, torch.bfloat16)
    angles, cache = layer.angles, layer.cache

    assert takes(angles, cache, torch.bfloat16)
    assert not takes(angles[:, :64], cache, torch.bfloat16)
    assert not takes(angles.double(), cache, torch.bfloat16)
    assert not takes(angles, cache, torch.float16)
    assert not takes(angles[:, :64].contiguous(), cache[..., :64], torch.bfloat16)
