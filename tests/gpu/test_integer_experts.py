"""Experts with integer weights on a GPU: kernels against the twin, layers against the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_fp8 import error, model_of
from tests.unit.worker.models import models
from tests.unit.worker.quantization import integer_checkpoints
from tests.unit.worker.quantization.integer_checkpoints import FORMS
from trimaran.kernels import integer_reference
from trimaran.kernels.cuda import integer_experts as cuda_experts
from trimaran.kernels.gpu import TritonOps
from trimaran.kernels.integer_products import IntegerProducts
from trimaran.kernels.integer_reference import pack
from trimaran.kernels.integers import Groups, IntegerWeight
from trimaran.kernels.routing import ExpertForm

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
SIZES = {"qwen3": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 1792), "odd": (6, 3, 272, 200)}
OSS = {"oss": (8, 4, 2880, 2880), "oss odd": (6, 3, 288, 224)}
SIZES |= OSS
KINDS = {
    "groups": (4, 128, False), "zeros": (4, 32, True), "rows": (8, 0, False),
    "fp4": (4, 32, False),
}  # fmt: skip
"""Bits, size of groups (0: all inputs), and whether there are zero points."""

TOLERANCE = 0.01
"""SwiGLU is rounded to bf16 once in both."""


def experts_of(kind, count, outputs, inner):
    bits, size, has_zeros = KINDS[kind]
    groups = Groups(size or inner)
    generator = torch.Generator(DEVICE).manual_seed(outputs)
    found = []
    for _ in range(count):
        integers = torch.randint(
            0, 1 << bits, (outputs, inner), generator=generator, device=DEVICE
        )
        shape = outputs, -(-inner // groups.size)
        scales = torch.rand(shape, generator=generator, device=DEVICE) / (inner**0.5 * 2**bits)
        zeros = torch.randint(1, 1 << bits, shape, generator=generator, device=DEVICE)
        if kind == "fp4":
            scales = torch.exp2((scales.log2() - 1).ceil())
        weight = IntegerWeight(pack(integers.to(torch.uint8), bits), scales, groups, bits)
        weight = weight._replace(is_fp4=kind == "fp4")
        found.append(weight._replace(zeros=zeros.to(torch.int16)) if has_zeros else weight)
    return found


def make(kind, tokens, size):
    count, chosen, hidden, inner = SIZES[size]
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    x = torch.randn((tokens, hidden), generator=generator, device=DEVICE).bfloat16()
    odds = torch.rand((tokens, count), generator=generator, device=DEVICE)
    weights, ids = odds.topk(chosen)
    gate_up = experts_of(kind, count, 2 * inner, hidden)
    return (x, weights, ids.int()), gate_up, experts_of(kind, count, hidden, inner)


def ops_of(kernel, *, is_fixed=False):
    """The operators; ``kernel`` is "cuda" for Hopper's kernel, or "triton"."""
    dtype = torch.bfloat16 if kernel == "cuda" else None
    return TritonOps(is_deterministic=is_fixed, integers=IntegerProducts(dtype, is_fixed))


def store(ops, gate_up, down):
    return (
        ops.integer_expert_storage(gate_up, is_gated=True),
        ops.integer_expert_storage(down, is_gated=False),
    )


def form_of(size, gate_up, down):
    if size not in OSS:
        return None
    biases = [
        torch.randn(len(each), each[0].shape[0], device=DEVICE) for each in (gate_up, down)
    ]
    return ExpertForm(*(each.bfloat16() for each in biases), alpha=1.702, limit=7.0)


@pytest.mark.parametrize("kernel", ["cuda", "triton"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_those_of_the_plain_twin(kind, size, kernel):
    _, gate_up, down = make(kind, 1, size)
    defined = [integer_reference.expert_storage(each) for each in (gate_up, down)]
    form = form_of(size, gate_up, down)
    count, chosen, hidden, _ = SIZES[size]
    for is_fixed in (False, True):
        ops = ops_of(kernel, is_fixed=is_fixed)
        stored = store(ops, gate_up, down)
        for tokens in (1, 16, 300):
            x = torch.randn((tokens, hidden), device=DEVICE).bfloat16()
            weights, ids = torch.rand((tokens, count), device=DEVICE).topk(chosen)
            choice = x, weights, ids.int()
            found = ops.integer_expert_mlp(*choice, *stored, 0, form)
            expected = integer_reference.expert_mlp(*choice, *defined, 0, form)
            assert error(found, expected) < TOLERANCE, (is_fixed, tokens)


def test_the_cuda_kernel_takes_what_its_units_hold():
    for kind in KINDS:
        _, gate_up, down = make(kind, 1, "oss odd")
        stored = store(ops_of("cuda"), gate_up, down)
        assert all(each.packing is not None for each in stored), kind
    _, gate_up, down = make("fp4", 1, "odd")
    stored = store(ops_of("cuda"), gate_up, down)
    # Inputs that are no multiple of 32 leave a group incomplete.
    assert [each.packing is None for each in stored] == [True, True]


@pytest.mark.parametrize("rows", [(1, 0, 140, 33, 90), (1, 7, 0, 8, 9, 2) * 6])
@pytest.mark.parametrize("cut", cuda_experts.CUTS)
@pytest.mark.parametrize("kind", ["fp4", "groups", "rows"])
def test_rows_do_not_depend_on_the_cut_and_on_other_rows(kind, cut, rows):
    (x, _, _), gate_up, _ = make(kind, 300, "qwen3")
    gate_up = gate_up[: len(rows)]
    stored = ops_of("cuda").integer_expert_storage(gate_up, is_gated=True)
    totals = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    x = x[: sum(rows)].contiguous()
    found = cuda_experts.multiply(x, stored, totals, None, is_gated=True, cut=cut)
    first = 0
    for expert, count in enumerate(totals.tolist()):
        for row in {first, first + count - 1} if count else ():
            one = torch.zeros_like(totals)
            one[expert] = 1
            alone = cuda_experts.multiply(
                x[row : row + 1].clone(), stored, one, None, is_gated=True
            )
            assert alone[0].equal(found[row])
        first += count


@pytest.mark.parametrize("kernel", ["cuda", "triton"])
def test_a_fixed_result_of_a_token_does_not_depend_on_other_tokens(kernel):
    (x, weights, ids), gate_up, down = make("zeros", 130, "qwen3")
    ops = ops_of(kernel, is_fixed=True)
    stored = store(ops, gate_up, down)
    whole = ops.integer_expert_mlp(x, weights, ids, *stored)
    for row in (0, 77, 129):
        one = slice(row, row + 1)
        alone = ops.integer_expert_mlp(x[one], weights[one], ids[one], *stored)
        assert alone.equal(whole[one])


@pytest.mark.parametrize("kernel", ["cuda", "triton"])
def test_experts_of_other_ranks_are_left_out(kernel):
    (x, weights, ids), gate_up, down = make("groups", 40, "mixtral")
    ops = ops_of(kernel)
    whole = ops.integer_expert_mlp(x, weights, ids, *store(ops, gate_up, down))
    halves = [
        ops.integer_expert_mlp(
            x, weights, ids, *store(ops, gate_up[part], down[part]), part.start
        )
        for part in (slice(0, 4), slice(4, 8))
    ]
    assert error(halves[0].float() + halves[1].float(), whole) < TOLERANCE
    none = torch.full_like(ids, 4)
    away = ops.integer_expert_mlp(x, weights, none, *store(ops, gate_up[:4], down[:4]))
    assert not away.any()


@pytest.mark.parametrize("kernel", ["cuda", "triton"])
def test_experts_are_captured_in_a_graph(kernel):
    inputs, gate_up, down = make("groups", 16, "qwen3")
    ops = ops_of(kernel)
    stored = store(ops, gate_up, down)
    ops.integer_expert_mlp(*inputs, *stored)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ops.integer_expert_mlp(*inputs, *stored)
    inputs[2].copy_(inputs[2].flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert found.equal(ops.integer_expert_mlp(*inputs, *stored))


@pytest.mark.parametrize("name", ["awq", "gptq-desc-act", "packed-8-bits"])
def test_layers_of_experts_give_the_results_of_the_cpu(name, tmp_path):
    config = models.expert_configs()["qwen3-moe"]
    folder = integer_checkpoints.make(tmp_path, FORMS[name], config)
    ours = model_of(folder, DEVICE, torch.bfloat16)
    theirs = model_of(folder, torch.device("cpu"), torch.float32)
    path = "layers.1.mlp.experts"
    x = torch.randn((40, 240), dtype=torch.bfloat16)
    weights, ids = torch.rand(40, 6).topk(3)
    found = ours.get_submodule(path).forward(x.cuda(), weights.cuda(), ids.int().cuda())
    expected = theirs.get_submodule(path).forward(x.float(), weights, ids.int())
    assert error(found.cpu(), expected) < 2 * TOLERANCE
