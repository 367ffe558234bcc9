"""Products of few rows, streamed: the plain product, alone and between other kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trimaran.kernels.triton import norm as triton_norm
from trimaran.kernels.triton.skinny import can_stream, stream_gated, stream_parts

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def dtype(request):
    return request.param


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("outputs", "inner"), [(4096, 4096), (4096, 14336), (2112, 5120)])
def test_partial_sums_add_up_to_the_product(dtype, rows, outputs, inner):
    x = _random(rows, inner + 64, dtype=dtype)[:, :inner]
    weight = _random(outputs, inner, dtype=dtype) / 64
    assert can_stream(rows, weight, is_gated=False)

    parts = stream_parts(x, weight)

    exact = x.double() @ weight.double().T
    torch.testing.assert_close(parts.sum(0).double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("outputs", "inner"), [(28672, 4096), (11008, 2048)])
def test_the_gated_product_is_rounded_once(dtype, rows, outputs, inner):
    x, weight = _random(rows, inner, dtype=dtype), _random(outputs, inner, dtype=dtype) / 64
    assert can_stream(rows, weight, is_gated=True)

    actual = stream_gated(x, weight)

    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    expected = (F.silu(gate) * up).to(dtype)
    limit = 8e-3 if dtype is torch.bfloat16 else 1e-3
    torch.testing.assert_close(actual, expected, atol=limit / 8, rtol=limit)


def test_overlapping_kernels_of_a_graph_give_the_results_of_separate_kernels(dtype):
    weights = [
        (_random(28672, 4096, dtype=dtype) / 64, _random(4096, 14336, dtype=dtype) / 128)
        for _ in range(4)
    ]
    scale, start = _random(4096, dtype=dtype), _random(5, 4096, dtype=dtype)
    residual = start.clone()

    def run(wait) -> torch.Tensor:
        normed = triton_norm.rms_norm(residual, scale, 1e-5)
        for gate_up, down in weights:
            wait()
            inner = stream_gated(normed, gate_up)
            wait()
            parts = stream_parts(inner, down)
            wait()
            normed = triton_norm.rms_norm(parts, scale, 1e-5, residual)
        return normed

    expected = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = run(lambda: None)
    for _ in range(20):
        residual.copy_(start)
        graph.replay()
        assert actual.equal(expected)
