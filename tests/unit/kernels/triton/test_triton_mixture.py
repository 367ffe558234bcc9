"""A mixture of experts for few tokens in Triton's interpreter: choice and sums of the twin."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels import reference
from trimaran.kernels.experts.floats import FixedExperts, MeasuredExperts
from trimaran.kernels.gpu import TritonOps
from trimaran.kernels.routing import (
    ExpertCounter,
    ExpertMatrices,
    ExpertRouting,
    MixtureInput,
    MixtureWeights,
)
from trimaran.kernels.tables.grouped_table import GroupedTable
from trimaran.kernels.triton.few_tokens.mixture import can_mix, normed_logits, stream_mixture

RULES = {
    "softmax": ExpertRouting(num_chosen=3),
    "plain scores": ExpertRouting(num_chosen=3, is_normalised=False),
    "scaled sigmoid": ExpertRouting(num_chosen=3, scoring="sigmoid", scaling=2.5),
}


def make(tokens, experts, hidden, inner, num_shared):
    """Rows, logits, and the weights."""
    generator = torch.Generator().manual_seed(inner + tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def matrices(*counts: int, width: int) -> ExpertMatrices:
        gate_up = random(*counts, 2 * width, hidden) / hidden**0.5
        return ExpertMatrices(gate_up.half(), (random(*counts, hidden, width) / 16).half())

    shared = matrices(width=num_shared * inner) if num_shared else None
    x = random(tokens, hidden + 16).half()[:, :hidden]
    router = (random(experts, hidden) / hidden**0.5).half()
    weights = MixtureWeights(router, matrices(experts, width=inner), shared)
    return x, random(tokens, experts), weights


def twin(x, logits, routing, matrices):
    weights, ids = reference.choose_experts(logits, routing)
    routed, shared = [each.float() for each in matrices.routed], matrices.shared
    total = reference.expert_mlp(x.float(), weights, ids, *routed)
    if shared is not None:
        inner = reference.gated_linear(x.float(), shared.gate_up.float())
        total += reference.linear(inner, shared.down.float())
    return total


@pytest.mark.matrix(keep=4)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "inner", "num_shared"),
    [(1, 5, 512, 256, 0), (3, 9, 256, 256, 2), (2, 70, 256, 384, 1)],
)
def test_parts_add_up_to_the_sums_of_the_plain_twin(
    rule, tokens, experts, hidden, inner, num_shared
):
    x, logits, weights = make(tokens, experts, hidden, inner, num_shared)

    parts = stream_mixture(x, logits, RULES[rule], weights)

    assert parts.shape == (3 + num_shared, tokens, hidden)
    assert parts.dtype == torch.float32
    expected = twin(x, logits, RULES[rule], weights)
    torch.testing.assert_close(parts.sum(0), expected, atol=8e-3, rtol=8e-3)


def test_the_first_of_equal_experts_wins():
    x, _, weights = make(1, 6, 256, 256, 0)
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 0.0, 1.0]])
    counts = torch.zeros(6, dtype=torch.int64)

    stream_mixture(x, logits, RULES["softmax"], weights, ExpertCounter(counts))

    assert counts.tolist() == [1, 1, 0, 1, 0, 0]


def test_choices_of_real_tokens_are_counted():
    x, logits, weights = make(3, 9, 256, 256, 2)
    counts = torch.full((9,), 5, dtype=torch.int64)
    counter = ExpertCounter(counts, torch.tensor([2], dtype=torch.int32))

    stream_mixture(x, logits, RULES["softmax"], weights, counter)

    _, ids = reference.choose_experts(logits[:2], RULES["softmax"])
    assert (counts - 5).equal(ids.flatten().bincount(minlength=9))


# Only numpy in the interpreter warns.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_logits_of_nan_still_choose_experts_that_exist():
    x, logits, weights = make(1, 6, 256, 256, 0)
    counts = torch.zeros(8, dtype=torch.int64)
    counter = ExpertCounter(counts[1:7])

    stream_mixture(x, logits * float("nan"), RULES["softmax"], weights, counter)

    assert counts.sum() == 3
    assert not counts[[0, 7]].any()


def test_rules_and_shapes_without_a_kernel_are_told_apart():
    def empty(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def weights(experts=64, inner=1408, hidden=2048, shared=0, dtype=torch.bfloat16):
        down = empty(experts, hidden, inner, dtype=dtype)
        routed = ExpertMatrices(empty(experts, 2 * inner, hidden, dtype=dtype), down)
        both = ExpertMatrices(empty(2 * shared, hidden), empty(hidden, shared))
        router = empty(experts, hidden, dtype=dtype)
        return MixtureWeights(router, routed, both if shared else None)

    rule = ExpertRouting(num_chosen=6)
    assert can_mix(rule, weights())
    assert can_mix(rule, weights(shared=2816))
    assert not can_mix(rule, weights(shared=2048))
    assert not can_mix(rule, weights(experts=256))
    assert not can_mix(rule, weights(inner=1400))
    assert not can_mix(rule, weights(inner=14336))
    assert not can_mix(rule, weights(hidden=2000))
    assert not can_mix(rule, weights(dtype=torch.float32))
    assert not can_mix(ExpertRouting(num_chosen=6, num_groups=4), weights())


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_logits_are_those_of_the_norm_of_a_sum(parts):
    residual, _, weights = make(2, 6, 256, 256, 0)
    addend = torch.randn(max(parts, 1), 2, 256)
    x = None if not parts else addend if parts > 1 else addend[0].half()
    norm = torch.randn(256).half()
    rows = MixtureInput(x, residual, norm, 1e-5)
    before = residual.clone()

    normed, logits, total = normed_logits(rows, weights.router)

    assert residual.equal(before)
    expected = (residual.float() + (addend.sum(0) if parts else 0)).half()
    torch.testing.assert_close(total, expected, atol=4e-3, rtol=2e-3)
    of_sum = reference.rms_norm(total, norm, 1e-5)
    torch.testing.assert_close(normed, of_sum, atol=2e-3, rtol=2e-3)
    theirs = reference.router_logits(normed, weights.router)
    torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=1e-4)


def test_only_few_tokens_get_parts_and_none_with_fixed_sums():
    x, _, weights = make(2, 6, 256, 256, 1)
    norm = torch.ones(256).half()
    mixture = MeasuredExperts(torch.device("cpu"), torch.float16, GroupedTable({}))
    ops, routing = TritonOps(experts=mixture), RULES["softmax"]

    one = MixtureInput(x[:1], x[1:], norm, 1e-6)

    found = ops.mixture_parts(one, weights, routing)

    assert found is not None
    normed, logits, total = normed_logits(one, weights.router)
    assert found[0].equal(stream_mixture(normed, logits, routing, weights))
    assert found[1].equal(total)
    assert ops.mixture_parts(MixtureInput(None, x, norm, 1e-6), weights, routing) is None
    fixed = TritonOps(is_deterministic=True, experts=FixedExperts())
    assert fixed.mixture_parts(one, weights, routing) is None
