"""Experts in FP8: the plain twin against single products, the CPU's and Triton's beside it.

Triton runs in its interpreter, where some numbers that are rounded up to a power of two become
half of that power. The twin beside it then does the same. Rounding is compared on a GPU
(tests/gpu/test_fp8.py).
"""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels import byte_reference
from trimaran.kernels.build import load_library
from trimaran.kernels.byte_reference import ReferenceProduct, quantize_weight
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.kernels.gpu import TritonOps
from trimaran.kernels.quantized import FP8, BlockMap, ByteInputs, Fp8Experts
from trimaran.kernels.reference import silu_and_mul
from trimaran.kernels.torch_ops import TorchOps

OPS = {
    "torch": TorchOps(),
    "cpu": CpuOps(load_library(), torch.float32, 1),
    "triton": TritonOps(),
    "triton fixed": TritonOps(is_deterministic=True),
}
FORMS = ("rows", "static", "bound", "blocks", "powers")


def experts_of(form, count, outputs, inner, seed):
    """Random matrices, with scales of rows or of blocks."""
    generator = torch.Generator().manual_seed(seed)
    floats = torch.randn(count, outputs, inner, generator=generator) / inner**0.5
    block = {"blocks": (32, 64), "powers": (64, 64)}.get(form)
    pairs = [quantize_weight(matrix, block) for matrix in floats]
    blocks = None
    if block is not None:
        rows = (torch.arange(outputs) // block[0]).to(torch.int32)
        blocks = BlockMap.of(rows, 64, 0, rows.device)
    inputs = ByteInputs(
        torch.rand(count, generator=generator) / 64 + 0.01 if form == "static" else None,
        1.5 if form == "bound" else 0.0,
        form == "powers",
    )
    values, scales = (torch.stack(each) for each in zip(*pairs, strict=True))
    return Fp8Experts(values, scales, blocks, inputs)


def as_interpreter(x, scales):
    """`to_fp8` as Triton's interpreter rounds."""
    values = (x.float() * scales.reciprocal()).clamp(-448.0, 448.0)
    exponents = values.abs().log2().floor()
    steps = torch.exp2(exponents.clamp_min(-6.0) - 3)
    rounded = (values.abs() / steps + 0.5).floor() * steps
    is_lost = (rounded == torch.exp2(exponents + 1)) & (exponents % 2 == 0) & (exponents >= -6)
    return (torch.where(is_lost, rounded / 2, rounded) * values.sign()).to(FP8)


def make(form, tokens, count=6, chosen=2, hidden=128):
    # Blocks of 64 rows end where the matrices do: one scale serves a tile of columns.
    inner = 128 if form == "powers" else 96
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator)
    weights = torch.rand(tokens, chosen, generator=generator)
    ids = torch.rand(tokens, count, generator=generator).topk(chosen)[1].int()
    gate_up = experts_of(form, count, 2 * inner, hidden, 1)
    return x, weights, ids, gate_up, experts_of(form, count, hidden, inner, 2)


def stored(ops, experts):
    return experts._replace(values=ops.fp8_expert_storage(experts.values, experts.blocks))


def run(ops, x, weights, ids, gate_up, down, first=0):
    return ops.fp8_expert_mlp(x, weights, ids, stored(ops, gate_up), stored(ops, down), first)


def error(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("form", FORMS)
def test_a_token_gets_the_weighted_sum_of_its_experts(form):
    x, weights, ids, gate_up, down = make(form, 5)
    found = byte_reference.expert_mlp(x, weights, ids, gate_up, down)
    for row in range(5):
        expected = torch.zeros(1, 128)
        for weight, expert in zip(weights[row], ids[row].tolist(), strict=True):
            inner = silu_and_mul(ReferenceProduct(*gate_up.of(expert))(x[row : row + 1]))
            expected += weight * ReferenceProduct(*down.of(expert))(inner)
        torch.testing.assert_close(found[row : row + 1], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.matrix(keep=8)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["cpu", "triton", "triton fixed"])
@pytest.mark.parametrize("tokens", [1, 70])
def test_sums_are_those_of_the_plain_twin(name, form, tokens, monkeypatch):
    inputs = make(form, tokens)
    if name != "cpu":
        monkeypatch.setattr(byte_reference, "to_fp8", as_interpreter)
    expected = byte_reference.expert_mlp(*inputs)
    assert error(run(OPS[name], *inputs), expected) < 5e-3


@pytest.mark.matrix(keep=4)
@pytest.mark.parametrize("form", ["rows", "static", "blocks"])
@pytest.mark.parametrize("name", OPS)
def test_ranks_with_some_of_the_experts_sum_to_the_result_of_all_experts(name, form):
    x, weights, ids, gate_up, down = make(form, 20)

    def part(experts, first, end):
        inputs = experts.inputs
        if inputs.scale is not None:
            inputs = inputs._replace(scale=inputs.scale[first:end].clone())
        values, scales = (each[first:end].clone() for each in experts[:2])
        return Fp8Experts(values, scales, experts.blocks, inputs)

    parts = [
        run(OPS[name], x, weights, ids, part(gate_up, *ends), part(down, *ends), ends[0])
        for ends in ((0, 2), (2, 6))
    ]
    whole = run(OPS[name], x, weights, ids, gate_up, down)
    assert error(sum(each.float() for each in parts), whole) < 0.01


@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_a_tokens_result_on_the_cpu_does_not_depend_on_the_tokens_beside_it(form):
    x, weights, ids, gate_up, down = make(form, 30)
    together = run(OPS["cpu"], x, weights, ids, gate_up, down)
    for row in (0, 17, 29):
        one = slice(row, row + 1)
        alone = run(OPS["cpu"], x[one], weights[one], ids[one], gate_up, down)
        assert alone.equal(together[one])
