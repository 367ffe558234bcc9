"""Experts with integer weights: the plain twin against single products, the CPU's and Triton's
(in its interpreter) beside it.
"""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels import integer_reference, reference
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.kernels.gpu import TritonOps
from trimaran.kernels.integer_reference import ReferenceIntegerProduct, dequantize, pack
from trimaran.kernels.integers import Groups, IntegerWeight
from trimaran.kernels.reference import silu_and_mul
from trimaran.kernels.routing import ExpertForm
from trimaran.kernels.torch_ops import TorchOps
from trimaran.kernels.triton.integer_experts import Cut, expert_mlp, expert_storage

OPS = {
    "torch": TorchOps(),
    "cpu": CpuOps(load_library(), torch.float32, 1),
    "triton": TritonOps(),
    "triton fixed": TritonOps(is_deterministic=True),
}
FORMS = {
    "groups": (4, 32, False, False),
    "zeros": (4, 64, True, False),
    "small groups": (4, 24, True, False),
    "order": (4, 32, True, True),
    "8 bits": (8, None, False, False),
    "fp4": (4, 32, False, False),
    "fp4, groups cut": (4, 24, False, False),
}
"""Bits, size of groups, whether there are zero points, and whether groups are mixed."""


def experts_of(form, count, outputs, inner, seed):
    """Random matrices; inputs of each have an order of their own if groups are mixed."""
    bits, size, has_zeros, is_mixed = FORMS[form]
    size = size or inner
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        integers = torch.randint(0, 1 << bits, (outputs, inner), generator=generator)
        groups = Groups(size)
        numbers = groups.numbers(inner, integers.device)
        shape = outputs, int(numbers.max()) + 1
        if is_mixed:
            mixed = numbers[torch.randperm(inner, generator=generator)]
            # As on a rank that holds some inputs of a group, another number of each expert's.
            mixed[: int(torch.randint(1, 40, (), generator=generator))] = 0
            groups = groups._replace(of_inputs=mixed.int())
        zeros = torch.randint(1, 1 << bits, shape, generator=generator, dtype=torch.int16)
        scales = (torch.rand(shape, generator=generator) + 0.5) / (8 << bits)
        if form.startswith("fp4"):
            scales = torch.exp2(torch.randint(-6, -2, shape, generator=generator))
        weight = IntegerWeight(pack(integers.to(torch.uint8), bits), scales, groups, bits)
        weight = weight._replace(is_fp4=form.startswith("fp4"))
        found.append(weight._replace(zeros=zeros) if has_zeros else weight)
    return found


def make(form, tokens, count=4, chosen=2, hidden=64, inner=48):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator)
    weights = torch.rand(tokens, chosen, generator=generator)
    ids = torch.rand(tokens, count, generator=generator).topk(chosen)[1].int()
    gate_up = experts_of(form, count, 2 * inner, hidden, 1)
    return x, weights, ids, gate_up, experts_of(form, count, hidden, inner, 2)


def run(ops, x, weights, ids, gate_up, down, first=0, form=None):
    stored = (
        ops.integer_expert_storage(gate_up, is_gated=True),
        ops.integer_expert_storage(down, is_gated=False),
    )
    return ops.integer_expert_mlp(x, weights, ids, *stored, first, form)


def error(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def by_hand(x, weights, ids, gate_up, down):
    """The sums by one product after another."""
    total = torch.zeros_like(x)
    for row in range(len(x)):
        for weight, expert in zip(weights[row], ids[row].tolist(), strict=True):
            first, second = (
                ReferenceIntegerProduct(each[expert], has_byte_inputs=False)
                for each in (gate_up, down)
            )
            total[row] += weight * second(silu_and_mul(first(x[row : row + 1])))[0]
    return total


@pytest.mark.matrix(keep=20)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "most"), [("torch", 1e-5), ("cpu", 1e-3), ("triton", 1e-5),
                                            ("triton fixed", 1e-5)])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_token_gets_the_weighted_sum_of_its_experts(name, most, form, tokens):
    inputs = make(form, tokens)
    assert error(run(OPS[name], *inputs), by_hand(*inputs)) < most


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_of_another_form_have_biases_and_a_clamped_swiglu(name, tokens):
    inputs = make("groups", tokens)
    generator = torch.Generator().manual_seed(4)
    biases = [torch.randn(4, width, generator=generator) for width in (96, 64)]
    form = ExpertForm(*biases, alpha=1.7, limit=0.5)

    found = run(OPS[name], *inputs, 0, form)

    x, weights, ids, *stacks = inputs
    gate_up, down = (torch.stack([dequantize(w) for w in each]) for each in stacks)
    expected = reference.expert_mlp(x, weights, ids, gate_up, down, 0, form)
    assert error(found, expected) < 1e-3


@pytest.mark.matrix(keep=4)
@pytest.mark.parametrize("form", ["groups", "order"])
@pytest.mark.parametrize("name", OPS)
def test_ranks_with_some_of_the_experts_sum_to_the_result_of_all_experts(name, form):
    x, weights, ids, gate_up, down = make(form, 6)
    parts = [
        run(OPS[name], x, weights, ids, gate_up[slice(*ends)], down[slice(*ends)], ends[0])
        for ends in ((0, 1), (1, 4))
    ]
    whole = run(OPS[name], x, weights, ids, gate_up, down)
    assert error(sum(parts), whole) < 1e-5


@pytest.mark.parametrize("name", ["cpu", "triton fixed"])
def test_a_tokens_result_does_not_depend_on_the_tokens_beside_it(name):
    x, weights, ids, gate_up, down = make("zeros", 20)
    for row in (0, 19):
        # The token comes first in both runs. The interpreter multiplies by numpy, and numpy
        # rounds the rows of a tile by their place on processors without AVX-512.
        order = [row, *(other for other in range(20) if other != row)]
        together = run(OPS[name], x[order], weights[order], ids[order], gate_up, down)
        one = slice(row, row + 1)
        alone = run(OPS[name], x[one], weights[one], ids[one], gate_up, down)
        assert alone.equal(together[:1])


@pytest.mark.parametrize("shares", [2, 3])
def test_programs_that_share_steps_leave_the_sums_of_one(shares):
    x, weights, ids, gate_up, down = make("groups", 3, count=3, inner=160)
    x = x.half()
    stored = expert_storage(gate_up), expert_storage(down)
    cuts = Cut(16, 32), Cut(16, 32, shares)
    found = expert_mlp(x, weights, ids, *stored, cuts=cuts)
    defined = [integer_reference.expert_storage(each) for each in (gate_up, down)]
    expected = integer_reference.expert_mlp(x, weights, ids, *defined)
    assert error(found, expected) < 3e-3


def test_experts_that_no_token_chooses_may_hold_anything():
    x, weights, _, gate_up, down = make("groups", 3)
    ids = torch.full((3, 2), 1, dtype=torch.int32)
    expected = run(OPS["triton"], x, weights, ids, gate_up, down)
    gate_up[3] = gate_up[3]._replace(scales=torch.full_like(gate_up[3].scales, float("nan")))
    for name in OPS:
        assert error(run(OPS[name], x, weights, ids, gate_up, down), expected) < 1e-3
