"""Experts in Triton's interpreter: the choice, the order and the sums of the plain twin."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels import reference
from trimaran.kernels.experts.floats import FixedExperts, MeasuredExperts
from trimaran.kernels.routing import ExpertForm
from trimaran.kernels.tables.grouped_table import GroupedTable, stack_name
from trimaran.kernels.triton import experts as triton_experts

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
ROUTINGS = ("drawn", "one expert", "few experts")


def drawn_ids(routing: str, tokens: int, experts: int, chosen: int) -> torch.Tensor:
    """The chosen experts of each token, all different."""
    generator = torch.Generator().manual_seed(tokens)
    odds = torch.rand(tokens, experts, generator=generator)
    if routing == "one expert":
        # All tokens have expert 1, and the rest is drawn.
        odds[:, 1] = 2.0
    elif routing == "few experts":
        odds[:, chosen:] = -1.0
    return odds.topk(chosen, dim=-1)[1].int()


def make(dtype, tokens, experts, chosen, hidden, inner, routing="drawn"):
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x = random(tokens, hidden + 16).to(dtype)[:, :hidden]
    weights = random(tokens, chosen).softmax(-1)
    ids = drawn_ids(routing, tokens, experts, chosen)
    gate_up = (random(experts, 2 * inner, hidden) / hidden**0.5).to(dtype)
    down = (random(experts, hidden, inner) / inner**0.5).to(dtype)
    return x, weights, ids, gate_up, down


@pytest.mark.matrix(keep=3)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden", "inner"),
    [(1, 8, 2, 128, 64), (50, 8, 2, 80, 48), (33, 5, 3, 128, 80), (300, 4, 2, 64, 72)],
)
def test_sums_are_those_of_the_plain_twin(
    dtype, routing, tokens, experts, chosen, hidden, inner
):
    inputs = make(dtype, tokens, experts, chosen, hidden, inner, routing)

    actual = triton_experts.expert_mlp(*inputs)

    expected = reference.expert_mlp(*(each.float() for each in inputs[:2]), inputs[2],
                                    *(each.float() for each in inputs[3:]))  # fmt: skip
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=tolerance)
    assert actual.dtype == dtype


def test_tile_shapes_of_a_table_do_not_change_the_result():
    inputs = make(torch.float32, 20, 4, 2, 64, 48)
    cuts = {(4, 96, 64): "gated", (4, 64, 48): "plain"}
    table = GroupedTable(
        {stack_name(shape, kind): [(40, [16, 32, 16, 4, 2])] for shape, kind in cuts.items()}
    )
    mixture = MeasuredExperts(torch.device("cpu"), torch.float32, table)

    actual = mixture.expert_mlp(*inputs)

    torch.testing.assert_close(actual, reference.expert_mlp(*inputs), atol=1e-5, rtol=1e-4)
    assert mixture.backend == "triton"


def test_ranks_with_some_of_the_experts_sum_to_the_result_of_all_experts():
    x, weights, ids, gate_up, down = make(torch.float32, 40, 6, 2, 64, 32)
    parts = [
        triton_experts.expert_mlp(
            x, weights, ids, gate_up[first:end].clone(), down[first:end].clone(), first
        )
        for first, end in ((0, 3), (3, 6))
    ]

    expected = reference.expert_mlp(x, weights, ids, gate_up, down)
    torch.testing.assert_close(sum(parts), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_of_another_form_are_those_of_the_plain_twin(dtype, tokens):
    inputs = make(dtype, tokens, 5, 2, 64, 40)
    biases = (torch.randn(5, width, generator=torch.Generator().manual_seed(1)).to(dtype)
              for width in (80, 64))  # fmt: skip
    form = ExpertForm(*biases, alpha=1.7, limit=0.5)

    for run in (triton_experts.expert_mlp, FixedExperts().expert_mlp):
        actual = run(*inputs, 0, form)

        floats = (each if each.dtype is torch.int32 else each.float() for each in inputs)
        whole = ExpertForm(form.gate_up_bias.float(), form.down_bias.float(), 1.7, 0.5)
        expected = reference.expert_mlp(*floats, 0, whole)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("tokens", "experts"), [(300, 60), (2, 128), (1200, 128), (700, 7)])
def test_expert_assignments_are_sorted_by_expert_and_counted(tokens, experts):
    """The choices fill one block, some, and so many that their counts are scanned."""
    ids = drawn_ids("drawn", tokens, experts, 4)

    order, totals, positions = triton_experts.sort_assignments(ids, experts, 0)

    assert order.tolist() == ids.flatten().long().argsort(stable=True).tolist()
    assert totals[:experts].tolist() == ids.flatten().bincount(minlength=experts).tolist()
    assert not totals[experts:].any()
    assert order[positions.flatten()].tolist() == list(range(ids.numel()))


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 4097])
def test_kernel_arguments_are_aligned_for_any_number_of_tokens(num_tokens):
    ids = torch.randint(0, 3, (num_tokens, 3), dtype=torch.int32)

    order, totals, positions = triton_experts.sort_assignments(ids, 3, 0)

    assert [each.data_ptr() % 16 for each in (order, totals, positions)] == [0, 0, 0]
    assert order.numel() == positions.numel() == ids.numel()
