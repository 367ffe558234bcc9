"""The choice of experts: torch against the rules written out, and Triton against torch."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels import triton_routing
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu import CpuOps
from trimaran.kernels.routing import ExpertCounter, ExpertRouting
from trimaran.kernels.torch_ops import TorchOps

ROUTINGS = {
    "mixtral": ExpertRouting(num_chosen=2),
    "not normalised": ExpertRouting(num_chosen=4, is_normalised=False),
    "best groups": ExpertRouting(
        num_chosen=3, is_normalised=False, scaling=16.0, num_groups=5, num_chosen_groups=2
    ),
    "sigmoid": ExpertRouting(num_chosen=4, scoring="sigmoid", scaling=1.5),
    "two best of a group": ExpertRouting(
        num_chosen=5, scoring="sigmoid", scaling=2.5, num_groups=4, num_chosen_groups=3,
        num_ranked=2,
    ),
}  # fmt: skip


def drawn(tokens: int, experts: int) -> torch.Tensor:
    """The router's numbers."""
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts))


def expected(logits: list[float], routing: ExpertRouting, bias: list[float]):
    """One token's weight by expert, by the rules, number by number."""
    values = torch.tensor(logits, dtype=torch.float64)
    is_softmax = routing.scoring == "softmax"
    scores = (values.softmax(0) if is_softmax else values.sigmoid()).tolist()
    ranked = [score + each for score, each in zip(scores, bias, strict=True)]
    size = len(scores) // routing.num_groups
    groups = [range(first, first + size) for first in range(0, len(scores), size)]
    groups.sort(key=lambda group: -sum(sorted(ranked[x] for x in group)[-routing.num_ranked :]))
    left = [expert for group in groups[: routing.num_chosen_groups] for expert in group]
    chosen = sorted(left, key=lambda expert: -ranked[expert])[: routing.num_chosen]
    total = sum(scores[expert] for expert in chosen) if routing.is_normalised else 1.0
    return {expert: scores[expert] / total * routing.scaling for expert in chosen}


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_are_chosen_by_the_rules(routing, has_bias):
    logits = drawn(9, 20)
    bias = torch.linspace(0.2, -0.2, 20) if has_bias else None

    weights, ids = TorchOps().choose_experts(logits, routing, bias)

    assert ids.dtype == torch.int32
    added = [0.0] * 20 if bias is None else bias.tolist()
    for row, values in enumerate(logits.tolist()):
        wanted = expected(values, routing, added)
        assert ids[row].tolist() == list(wanted)
        torch.testing.assert_close(weights[row], torch.tensor(list(wanted.values())))


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 20), (9, 60), (6, 160)])
def test_tritons_choice_is_that_of_torch(routing, has_bias, tokens, experts):
    logits = drawn(tokens, experts)
    bias = torch.linspace(-0.2, 0.2, experts) if has_bias else None

    weights, ids = triton_routing.choose_experts(logits, routing, bias)

    of_torch = TorchOps().choose_experts(logits, routing, bias)
    assert ids.equal(of_torch[1])
    torch.testing.assert_close(weights, of_torch[0])


@pytest.mark.parametrize("ops", [TorchOps(), CpuOps(load_library(), torch.bfloat16, 1)])
def test_the_routers_numbers_are_not_rounded(ops):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 96, generator=generator).bfloat16()
    weight = torch.randn(12, 96, generator=generator).bfloat16()

    logits = ops.router_logits(x, weight)

    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T)


@pytest.mark.parametrize("choose", [TorchOps().choose_experts, triton_routing.choose_experts])
def test_choices_are_counted_but_those_of_padding_are_not(choose):
    logits = drawn(11, 12)
    routing = ROUTINGS["mixtral"]
    counts = torch.arange(12)

    _, ids = choose(logits, routing, None, ExpertCounter(counts))
    choose(logits, routing, None, ExpertCounter(counts, torch.tensor([6], dtype=torch.int32)))

    once, twice = ids[6:].flatten(), ids[:6].flatten()
    expected = twice.bincount(minlength=12) * 2 + once.bincount(minlength=12)
    assert counts.tolist() == (torch.arange(12) + expected).tolist()
