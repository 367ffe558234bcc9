"""Products by our Hopper kernel against torch's, over shapes, cuts and numbers of rows."""

from __future__ import annotations

import random

import pytest
import torch

from trimaran.kernels import reference
from trimaran.kernels.cuda.hopper_gemm import HopperGemm
from trimaran.kernels.products import HopperProducts
from trimaran.kernels.tables.product_table import GemmShape, fixed_choice

DEVICE = torch.device("cuda")
CUTS = [
    GemmShape(64, 224), GemmShape(64, 256, 8), GemmShape(64, 96, 2, 4),
    GemmShape(64, 112, 1, 2), GemmShape(64, 64, 2), GemmShape(128, 192, 4),
    GemmShape(128, 224, 1, 4), GemmShape(128, 128, 3, 2), GemmShape(192, 112, 1, 4),
    GemmShape(192, 96, 2, 2), GemmShape(256, 112, 1, 4), GemmShape(256, 96, 2, 2),
    GemmShape(256, 192), GemmShape(128, 128, 1, 2, shares_weights=True),
    GemmShape(64, 192, 1, 4, shares_weights=True),
    GemmShape(256, 96, 1, 2, shares_weights=True),
]  # fmt: skip
PARTS_CUTS = [*CUTS, GemmShape(256, 128, 4), GemmShape(128, 96, 3, 2, shares_weights=True)]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}

pytestmark = pytest.mark.gpu


def _drawn(rows: int, outputs: int, inner: int, dtype: torch.dtype):
    generator = torch.Generator(DEVICE).manual_seed(rows * outputs + inner)
    x = torch.randn((rows, inner), generator=generator, device=DEVICE)
    weight = torch.randn((outputs, inner), generator=generator, device=DEVICE) * inner**-0.5
    return x.to(dtype), weight.to(dtype)


def _poison(rows: int, outputs: int, dtype: torch.dtype) -> None:
    """Leave NaN where the allocator will put the next output, to see what is not written."""
    torch.full((rows, -(-outputs // 8) * 8), float("nan"), device=DEVICE, dtype=dtype)


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_tile_shape_multiplies_random_shapes(cut, dtype):
    kernel = HopperGemm(cut, dtype, DEVICE)
    draw = random.Random(str(cut))
    for _ in range(6):
        rows, outputs = draw.randint(1, 600), draw.randint(8, 3000)
        x, weight = _drawn(rows, outputs, 8 * draw.randint(64, 512), dtype)
        _poison(rows, outputs, dtype)

        actual = kernel(x, weight)

        expected = x.float() @ weight.float().T
        assert _error(actual, expected) < TOLERANCE[dtype], (rows, outputs, x.shape[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_tile_shape_gates_random_shapes(cut, dtype):
    kernel = HopperGemm(cut, dtype, DEVICE, "gated")
    draw = random.Random(str(cut))
    for _ in range(6):
        rows, outputs = draw.randint(1, 600), draw.randint(8, 1500)
        x, weight = _drawn(rows, 2 * outputs, 8 * draw.randint(64, 512), dtype)
        _poison(rows, outputs, dtype)

        actual = kernel(x, weight)

        expected = reference.silu_and_mul(x.float() @ weight.float().T)
        assert _error(actual, expected) < TOLERANCE[dtype], (rows, outputs, x.shape[1])


@pytest.mark.parametrize("split", [1, 4])
def test_gates_of_any_size_are_those_of_silu(split):
    kernel = HopperGemm(GemmShape(64, 128, split), torch.bfloat16, DEVICE, "gated")
    gates = [-1e30, -1e4, -200.0, -88.5, -20.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 88.5, 1e4, 1e30]
    x = torch.eye(len(gates), 512, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.ones(16, 512, dtype=torch.bfloat16, device=DEVICE)
    weight[:8, : len(gates)] = torch.tensor(gates, device=DEVICE)

    actual = kernel(x, weight)

    expected = torch.nn.functional.silu(weight[:8].float().T[: len(gates)])
    assert torch.allclose(actual.float(), expected, rtol=4e-3, atol=1e-30)


@pytest.mark.parametrize("cut", PARTS_CUTS, ids=str)
def test_partial_sums_of_every_tile_shape_add_up(cut):
    kernel = HopperGemm(cut, torch.bfloat16, DEVICE, "parts")
    draw = random.Random(str(cut))
    for _ in range(6):
        rows, outputs = draw.randint(1, 600), draw.randint(8, 3000)
        x, weight = _drawn(rows, outputs, 8 * draw.randint(64, 512), torch.bfloat16)
        torch.full((cut.split, rows, -(-outputs // 8) * 8), float("nan"), device=DEVICE)

        parts = kernel(x, weight)

        assert parts.shape == (cut.split, rows, outputs) and parts.dtype == torch.float32
        assert _error(parts.sum(0), x.float() @ weight.float().T) < 1e-4


@pytest.mark.parametrize("outputs, inner", [(4096, 4096), (6144, 4096), (4096, 14336)])
def test_a_deterministic_row_is_the_same_to_the_bit_in_any_batch(outputs, inner):
    products = HopperProducts(DEVICE, torch.bfloat16, is_deterministic=True)
    x, weight = _drawn(1024, outputs, inner, torch.bfloat16)
    whole = products.linear(x, weight)
    gated = products.gated_linear(x, weight)

    for rows in (1, 2, 63, 64, 65, 128, 200, 256, 700):
        assert products.linear(x[:rows], weight).equal(whole[:rows])
        assert products.linear(x[-rows:], weight).equal(whole[-rows:])
        assert products.gated_linear(x[:rows], weight).equal(gated[:rows])


def test_products_of_measured_shapes_are_those_of_torch_in_a_graph():
    products = HopperProducts(DEVICE, torch.bfloat16)
    x, gate_up = _drawn(48, 28672, 4096, torch.bfloat16)
    down = _drawn(1, 4096, 14336, torch.bfloat16)[1]

    def mlp() -> torch.Tensor:
        return products.linear(products.gated_linear(x, gate_up), down)

    expected = reference.silu_and_mul(x.float() @ gate_up.float().T) @ down.float().T
    mlp()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = mlp()
    for _ in range(3):
        output.fill_(float("nan"))
        graph.replay()
        assert _error(output, expected) < 6e-3


def test_a_product_that_the_kernel_cannot_take_is_refused_by_its_inner_dimension():
    x, weight = _drawn(3, 64, 100, torch.bfloat16)
    kernel = HopperGemm(fixed_choice(3, 64, 100), torch.bfloat16, DEVICE)

    with pytest.raises(ValueError, match="an inner dimension of 100"):
        kernel(x, weight)
