"""Grouped products by our Hopper kernel against torch's, over cuts and numbers of rows."""

from __future__ import annotations

import random

import pytest
import torch

from trimaran.kernels import reference
from trimaran.kernels.cuda.grouped_gemm import GroupedGemm
from trimaran.kernels.experts.floats import MeasuredExperts
from trimaran.kernels.routing import ExpertRouting
from trimaran.kernels.tables.grouped_table import GroupedShape, GroupedTable, stack_name
from trimaran.kernels.triton.routing import choose_experts

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
CUTS = [
    GroupedShape(64, 16), GroupedShape(64, 64), GroupedShape(128, 32),
    GroupedShape(128, 128, 2), GroupedShape(128, 256, 2), GroupedShape(256, 64),
    GroupedShape(256, 192), GroupedShape(256, 192, 2), GroupedShape(256, 112, 4),
]  # fmt: skip
CASES = [(cut, torch.bfloat16) for cut in CUTS] + [(cut, torch.float16) for cut in CUTS[::4]]
"""The compiler takes some seconds to some tens of them for each."""
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


def drawn_totals(draw: random.Random, experts: int, most: int) -> list[int]:
    """Rows of each expert; some experts have no rows."""
    return [draw.choice((0, draw.randint(1, most))) for _ in range(experts - 1)] + [most]


def expected_of(x, weights, totals, *, is_gated: bool) -> torch.Tensor:
    """Expert by expert in float32."""
    parts = []
    for rows, weight in zip(x.float().split(totals), weights.float(), strict=True):
        product = rows @ weight.T
        if is_gated:
            gate, up = product.chunk(2, dim=1)
            product = torch.nn.functional.silu(gate) * up
        parts.append(product)
    return torch.cat(parts)


@pytest.mark.parametrize("kind", ["plain", "gated"])
@pytest.mark.parametrize(("cut", "dtype"), CASES, ids=str)
def test_every_tile_shape_multiplies_random_groups(cut, kind, dtype):
    draw = random.Random(f"{cut} {kind}")
    for _ in range(4):
        experts = draw.choice((1, 5, 8, 60))
        kernel = GroupedGemm(cut, dtype, DEVICE, kind, experts)
        totals = drawn_totals(draw, experts, draw.choice((1, 20, 400)))
        inner, outputs = 8 * draw.randint(8, 200), 16 * draw.randint(1, 60)
        x = torch.randn(sum(totals), inner, device=DEVICE).to(dtype)
        weights = torch.randn(experts, outputs, inner, device=DEVICE) * inner**-0.5
        weights = weights.to(dtype)
        # NaN where the allocator will put the output, to see what is not written.
        columns = outputs // 2 if kind == "gated" else outputs
        torch.full((len(x), columns), float("nan"), device=DEVICE, dtype=dtype)

        actual = kernel(x, weights, torch.tensor(totals, dtype=torch.int32, device=DEVICE))

        expected = expected_of(x, weights, totals, is_gated=kind == "gated")
        error = (actual.float() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype], (totals, inner, outputs)


@pytest.mark.parametrize("tokens", [1, 7, 64, 500])
def test_a_graph_follows_the_routing(tokens):
    experts, hidden, inner = 8, 512, 768
    gate_up = 0.05 * torch.randn(experts, 2 * inner, hidden, device=DEVICE).bfloat16()
    down = 0.05 * torch.randn(experts, hidden, inner, device=DEVICE).bfloat16()
    cuts = [(10_000, [256, 192, 2] if tokens > 64 else [64, 32, 1])]
    entries = {}
    for held in (experts, experts // 2):
        entries[stack_name((held, 2 * inner, hidden), "gated")] = cuts
        entries[stack_name((held, hidden, inner), "plain")] = cuts
    table = GroupedTable(entries)
    mixture = MeasuredExperts(DEVICE, torch.bfloat16, table)
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    logits = torch.randn(tokens, experts, device=DEVICE)
    routing = ExpertRouting(num_chosen=2)

    def run() -> torch.Tensor:
        return mixture.expert_mlp(x, *choose_experts(logits, routing), gate_up, down)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    # All tokens choose two experts; then each token chooses different experts.
    for changed in (torch.arange(8.0).expand(tokens, 8), -logits):
        logits.copy_(changed)
        graph.replay()
        chosen = reference.choose_experts(logits, routing)
        expected = reference.expert_mlp(x.float(), *chosen, gate_up.float(), down.float())
        torch.testing.assert_close(output.float(), expected, atol=3e-2, rtol=3e-2)
    halves = [
        mixture.expert_mlp(
            x, *chosen, gate_up[first : first + 4], down[first : first + 4], first
        )
        for first in (0, 4)
    ]
    torch.testing.assert_close(sum(halves).float(), expected, atol=3e-2, rtol=3e-2)


def test_a_rows_result_does_not_depend_on_the_rows_beside_it():
    x = torch.randn(300, 512, device=DEVICE).bfloat16()
    weights = 0.05 * torch.randn(2, 256, 512, device=DEVICE).bfloat16()

    def run(cut: GroupedShape, *totals: int) -> torch.Tensor:
        counts = torch.tensor(totals, dtype=torch.int32, device=DEVICE)
        kernel = GroupedGemm(cut, torch.bfloat16, DEVICE, "plain", 2)
        return kernel(x[: sum(totals)], weights, counts)

    together = run(GroupedShape(256, 192, 2), 300, 0)
    for rows in (1, 17, 200):
        assert run(GroupedShape(64, 32), rows, 0).equal(together[:rows])
        assert run(GroupedShape(128, 256), rows, 300 - rows)[:rows].equal(together[:rows])
