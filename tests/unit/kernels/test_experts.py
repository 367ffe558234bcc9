"""Experts: the plain twin against every expert computed for every token, and the CPU's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trimaran.kernels import reference
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.kernels.routing import ExpertForm, ExpertRouting
from trimaran.kernels.torch_ops import TorchOps

OPS = {"torch": TorchOps(), "cpu kernels": CpuOps(load_library(), torch.float32, 1)}


def make(tokens: int, experts: int, chosen: int, hidden: int = 24, inner: int = 10):
    """Tokens, the router's weights and ids, and the experts' matrices."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator)
    logits = torch.randn(tokens, experts, generator=generator)
    gate_up = torch.randn(experts, 2 * inner, hidden, generator=generator) / 4
    down = torch.randn(experts, hidden, inner, generator=generator) / 4
    return (
        x,
        *reference.choose_experts(logits, ExpertRouting(num_chosen=chosen)),
        gate_up,
        down,
    )


def form_of(gate_up, down, limit):
    """Random biases for experts with these matrices, and the constants of SwiGLU."""
    generator = torch.Generator().manual_seed(1)
    gate_up_bias = torch.randn(gate_up.shape[:2], generator=generator)
    down_bias = torch.randn(down.shape[:2], generator=generator)
    return ExpertForm(gate_up_bias, down_bias, alpha=1.7, limit=limit)


def expected(x, weights, ids, gate_up, down):
    """The output of every expert for every token, and zero for unchosen experts."""
    gate, up = torch.einsum("td,xed->txe", x, gate_up).chunk(2, dim=-1)
    outputs = torch.einsum("txf,xdf->txd", F.silu(gate) * up, down)
    shares = torch.zeros(x.shape[0], gate_up.shape[0]).scatter(1, ids.long(), weights)
    return torch.einsum("tx,txd->td", shares, outputs)


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 8, 2), (33, 5, 3), (7, 60, 4)])
def test_a_token_gets_the_weighted_sum_of_its_experts(ops, tokens, experts, chosen):
    inputs = make(tokens, experts, chosen)

    torch.testing.assert_close(ops.expert_mlp(*inputs), expected(*inputs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
@pytest.mark.parametrize("limit", [0.4, 7.0])
def test_experts_of_another_form_have_biases_and_a_clamped_swiglu(ops, limit):
    x, weights, ids, gate_up, down = make(9, 5, 2)
    form = form_of(gate_up, down, limit)

    found = ops.expert_mlp(x, weights, ids, gate_up, down, 0, form)

    both = torch.einsum("td,xed->txe", x, gate_up) + form.gate_up_bias
    gate, up = both.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    inner = gate * torch.sigmoid(1.7 * gate) * (up + 1)
    outputs = torch.einsum("txf,xdf->txd", inner, down) + form.down_bias
    shares = torch.zeros(9, 5).scatter(1, ids.long(), weights)
    expected = torch.einsum("tx,txd->td", shares, outputs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cpus_clamped_swiglu_is_that_of_the_reference_and_keeps_nan(dtype):
    gate_up = (torch.randn(7, 2 * 37, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    gate_up[2, 3], gate_up[4, 40], gate_up[5, 1] = float("nan"), float("nan"), float("inf")
    ops = CpuOps(load_library(), dtype, 1)

    found = ops.clamped_swiglu(gate_up, 1.7, 3.0)

    expected = reference.clamped_swiglu(gate_up, 1.7, 3.0)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-2, equal_nan=True)


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
def test_ranks_with_some_of_the_experts_sum_to_the_result_of_all_experts(ops):
    x, weights, ids, gate_up, down = make(20, 6, 2)
    parts = [
        ops.expert_mlp(x, weights, ids, gate_up[first:end], down[first:end], first)
        for first, end in ((0, 2), (2, 3), (3, 6))
    ]

    whole = ops.expert_mlp(x, weights, ids, gate_up, down)
    torch.testing.assert_close(sum(parts), whole, atol=1e-5, rtol=1e-4)


def test_a_rank_without_a_tokens_experts_adds_zero():
    x, weights, _, gate_up, down = make(3, 4, 2)
    elsewhere = torch.zeros(3, 2, dtype=torch.int32)

    assert not TorchOps().expert_mlp(x, weights, elsewhere, gate_up[2:], down[2:], 2).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tokens_result_on_the_cpu_does_not_depend_on_the_tokens_beside_it(dtype):
    x, weights, ids, gate_up, down = make(50, 8, 2, hidden=51)
    ops = CpuOps(load_library(), dtype, 1)
    matrices = (gate_up.to(dtype), down.to(dtype))

    together = ops.expert_mlp(x.to(dtype), weights, ids, *matrices)

    for row in range(50):
        one = slice(row, row + 1)
        alone = ops.expert_mlp(x[one].to(dtype), weights[one], ids[one], *matrices)
        assert alone.equal(together[one])
