"""Experts on a GPU against the plain twin, and within a CUDA graph whose routing changes."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels import reference
from trimaran.kernels.products import select_products
from trimaran.kernels.routing import (
    ExpertCounter,
    ExpertMatrices,
    ExpertRouting,
    ExpertSlotTable,
    MixtureInput,
    MixtureWeights,
)
from trimaran.kernels.triton import experts as triton_experts
from trimaran.kernels.triton import routing as triton_routing
from trimaran.kernels.triton.few_tokens.few_experts import can_stream, stream_experts
from trimaran.kernels.triton.few_tokens.mixture import can_mix, normed_logits, stream_mixture

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}


def make(dtype, tokens, experts, chosen, hidden, inner):
    """Tokens, logits of the router, and the experts' matrices."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
    logits = torch.randn(tokens, experts, device=DEVICE).to(dtype)
    gate_up = torch.randn(experts, 2 * inner, hidden, device=DEVICE) / hidden**0.5
    down = torch.randn(experts, hidden, inner, device=DEVICE) / inner**0.5
    return x, logits, gate_up.to(dtype), down.to(dtype), chosen


def by_triton(x, logits, gate_up, down, chosen):
    """The choice and the sums by Triton."""
    weights, ids = triton_routing.choose_experts(logits, ExpertRouting(num_chosen=chosen))
    return triton_experts.expert_mlp(x, weights, ids, gate_up, down)


def by_twin(x, logits, gate_up, down, chosen):
    """The same in float32 by the twin."""
    weights, ids = reference.choose_experts(logits, ExpertRouting(num_chosen=chosen))
    return reference.expert_mlp(x.float(), weights, ids, gate_up.float(), down.float())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden", "inner"),
    [
        (1, 8, 2, 1024, 3584), (64, 8, 2, 1024, 3584), (300, 60, 4, 1000, 700),
        (2000, 8, 2, 1024, 1792), (3000, 128, 8, 512, 384),
    ],
)  # fmt: skip
def test_sums_are_those_of_the_plain_twin(dtype, tokens, experts, chosen, hidden, inner):
    inputs = make(dtype, tokens, experts, chosen, hidden, inner)

    actual, expected = by_triton(*inputs), by_twin(*inputs)

    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (70, 60), (500, 256)])
def test_router_logits_are_not_rounded(tokens, experts, is_deterministic):
    products = select_products(DEVICE, torch.bfloat16, is_deterministic)
    x = torch.randn(tokens, 1024, device=DEVICE).bfloat16()
    weight = torch.randn(experts, 1024, device=DEVICE).bfloat16()

    logits = products.router_logits(x, weight)

    assert logits.dtype == torch.float32
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(logits.double(), expected, atol=1e-3, rtol=1e-4)


def test_a_graph_follows_the_routing():
    x, logits, *rest = make(torch.bfloat16, 48, 8, 2, 512, 1024)
    by_triton(x, logits, *rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = by_triton(x, logits, *rest)
    # All tokens choose two experts; then each token chooses different experts.
    for changed in (torch.arange(8.0).expand(48, 8), -logits.float()):
        logits.copy_(changed)
        graph.replay()
        expected = by_twin(x, logits, *rest)
        torch.testing.assert_close(output.float(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("experts", "chosen", "hidden", "inner"),
    [(8, 2, 1024, 3584), (64, 6, 2048, 1408), (128, 8, 2048, 768)],
)
def test_a_graph_of_one_token_streams_the_experts_of_every_rank(
    dtype, experts, chosen, hidden, inner
):
    x, logits, gate_up, down, _ = make(dtype, 1, experts, chosen, hidden, inner)
    assert can_stream(1, chosen, gate_up)
    rule, parts = ExpertRouting(num_chosen=chosen), (slice(0, 3), slice(3, experts))
    held = [(gate_up[part].clone(), down[part].clone(), part.start) for part in parts]

    def run() -> list[torch.Tensor]:
        weights, ids = triton_routing.choose_experts(logits, rule)
        return [
            stream_experts(x, weights, ids, gate_up, down),
            *(stream_experts(x, weights, ids, *each) for each in held),
        ]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        whole, *some = run()
    tolerance = TOLERANCE[dtype]
    # Tokens with zero, one, two and more of a rank's experts.
    for _ in range(6):
        logits.copy_(torch.randn(1, experts, device=DEVICE))
        graph.replay()
        expected = by_twin(x, logits, gate_up, down, chosen)
        for actual in (whole.float(), sum(each.float() for each in some)):
            torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(
    ("experts", "chosen", "hidden", "inner", "num_shared"),
    [(8, 2, 1024, 3584, 0), (64, 6, 2048, 1408, 2), (128, 8, 2048, 768, 0)],
)
def test_a_graph_of_few_tokens_streams_chosen_and_shared_experts(
    dtype, tokens, experts, chosen, hidden, inner, num_shared
):
    x, _, *stacks, _ = make(dtype, tokens, experts, chosen, hidden, inner)
    residual, shared = torch.empty_like(x), None
    if num_shared:
        *_, gate_up, down, _ = make(dtype, tokens, 1, 1, hidden, num_shared * inner)
        shared = ExpertMatrices(gate_up[0], down[0])
    router = torch.randn(experts, hidden, device=DEVICE).to(dtype)
    weights = MixtureWeights(router, ExpertMatrices(*stacks), shared)
    rows = MixtureInput(x, residual, torch.rand(hidden, device=DEVICE).to(dtype), 1e-6)
    counts = torch.zeros(experts, dtype=torch.int64, device=DEVICE)
    rule, counter = ExpertRouting(num_chosen=chosen), ExpertCounter(counts)
    assert can_mix(rule, weights)

    def run() -> list[torch.Tensor]:
        normed, logits, total = normed_logits(rows, router)
        return [stream_mixture(normed, logits, rule, weights, counter), normed, total]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts, normed, total = run()
    for _ in range(6):
        x.normal_()
        residual.normal_()
        counts.zero_()
        graph.replay()
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(total, x + residual)
        scaled = reference.rms_norm(total, rows.norm, 1e-6)
        torch.testing.assert_close(normed, scaled, atol=tolerance, rtol=tolerance)
        logits = reference.router_logits(normed, router)
        shares, ids = reference.choose_experts(logits, rule)
        floats = [each.float() for each in stacks]
        expected = reference.expert_mlp(normed.float(), shares, ids, *floats)
        if shared is not None:
            inner_TF = reference.gated_linear(normed.float(), shared.gate_up.float())
            expected += reference.linear(inner_TF, shared.down.float())
        torch.testing.assert_close(parts.sum(0), expected, atol=tolerance, rtol=tolerance)
        assert counts.equal(ids.flatten().long().bincount(minlength=experts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_token_with_fixed_tiles_does_not_depend_on_other_tokens(dtype):
    x, logits, gate_up, down, chosen = make(dtype, 700, 8, 2, 512, 1024)
    weights, ids = triton_routing.choose_experts(logits, ExpertRouting(num_chosen=chosen))

    cut = triton_experts.likely_cut(triton_experts.FIXED_ROWS, dtype)

    def run(rows: slice) -> torch.Tensor:
        return triton_experts.expert_mlp(
            x[rows], weights[rows], ids[rows], gate_up, down, 0, None, (cut, cut)
        )

    together = run(slice(0, 700))
    for rows in (slice(5, 6), slice(100, 164), slice(300, 700)):
        assert run(rows).equal(together[rows])


def test_a_graph_counts_chosen_experts_without_those_of_padding():
    logits = torch.randn(48, 60, device=DEVICE)
    counts = torch.zeros(60, dtype=torch.int64, device=DEVICE)
    num_tokens = torch.tensor([48], dtype=torch.int32, device=DEVICE)
    counter, routing = ExpertCounter(counts, num_tokens), ExpertRouting(num_chosen=4)
    triton_routing.choose_experts(logits, routing, None, counter)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, ids = triton_routing.choose_experts(logits, routing, None, counter)
    expected = ids.new_zeros(60, dtype=torch.int64)
    counts.zero_()
    for real in (48, 5):
        num_tokens.fill_(real)
        graph.replay()
        expected += ids[:real].flatten().bincount(minlength=60)
        assert counts.equal(expected)


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "parts"), [(1, 8, 2, 2), (48, 60, 4, 3), (9, 256, 8, 8)]
)
def test_a_graph_follows_experts_that_change_slots(tokens, experts, chosen, parts):
    logits = torch.randn(tokens, experts, device=DEVICE)
    table = ExpertSlotTable(
        torch.zeros(experts, parts, dtype=torch.int32, device=DEVICE),
        torch.ones(experts, dtype=torch.int32, device=DEVICE),
    )
    routing = ExpertRouting(num_chosen=chosen)
    triton_routing.choose_experts(logits, routing, None, None, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, slots = triton_routing.choose_experts(logits, routing, None, None, table)
    for copies in range(1, parts + 1):
        table.slots.copy_(torch.randperm(experts * parts).view(experts, parts))
        table.num_copies.copy_(torch.randint(1, copies + 1, (experts,)))
        logits.normal_()
        graph.replay()
        expected = reference.choose_experts(logits, routing, None, None, table)
        assert slots.equal(expected[1])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_router_logits_of_nan_still_choose_valid_experts(scoring):
    logits = torch.full((3, 60), float("nan"), device=DEVICE)
    counts = torch.zeros(64, dtype=torch.int64, device=DEVICE)

    routing = ExpertRouting(num_chosen=4, scoring=scoring)
    _, ids = triton_routing.choose_experts(logits, routing, None, ExpertCounter(counts[:60]))

    assert ((ids >= 0) & (ids < 60)).all()
    assert counts.sum() == ids.numel()
    assert not counts[60:].any()
