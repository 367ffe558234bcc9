"""Experts in FP8 on a GPU: kernels against the plain twin, and layers of models on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_fp8 import error, model_of
from tests.unit.worker.models import models
from tests.unit.worker.quantization import checkpoints
from trimaran.kernels import byte_reference
from trimaran.kernels.gpu import TritonOps
from trimaran.kernels.integer_products import IntegerProducts
from trimaran.kernels.quantized import FP8, BlockMap, ByteInputs, Fp8Experts

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
FORMS = ("rows", "static", "blocks")
SIZES = {"qwen3": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 1792), "odd": (6, 3, 272, 200)}
TOLERANCE = 0.02
"""SwiGLU is rounded twice; a neighbouring FP8 number may follow."""


def experts_of(form, count, outputs, inner):
    generator = torch.Generator(DEVICE).manual_seed(outputs)
    values = torch.randn((count, outputs, inner), generator=generator, device=DEVICE)
    values = values.mul_(40).to(FP8)
    if form != "blocks":
        scales = torch.rand((count, outputs), generator=generator, device=DEVICE) / 2048
        static = torch.rand(count, generator=generator, device=DEVICE) / 64 + 0.01
        return Fp8Experts(
            values, scales, None, ByteInputs(static if form == "static" else None)
        )
    rows = (torch.arange(outputs) // 128).to(torch.int32)
    blocks = BlockMap.of(rows, 128, 0, DEVICE)
    shape = count, int(rows[-1]) + 1, -(-inner // 128)
    scales = torch.rand(shape, generator=generator, device=DEVICE) / 2048
    return Fp8Experts(values, scales, blocks, ByteInputs())


def make(form, tokens, size):
    count, chosen, hidden, inner = SIZES[size]
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    x = torch.randn((tokens, hidden), generator=generator, device=DEVICE).bfloat16()
    odds = torch.rand((tokens, count), generator=generator, device=DEVICE)
    weights, ids = odds.topk(chosen)
    gate_up = experts_of(form, count, 2 * inner, hidden)
    return x, weights, ids.int(), gate_up, experts_of(form, count, hidden, inner)


def ops_of(kernel, *, is_fixed=False):
    """The operators; ``kernel`` is "cuda" for Hopper's kernel, or "triton"."""
    dtype = torch.bfloat16 if kernel == "cuda" else None
    return TritonOps(is_deterministic=is_fixed, integers=IntegerProducts(dtype, is_fixed))


@pytest.mark.parametrize("kernel", ["cuda", "triton"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_sums_are_those_of_the_plain_twin(form, tokens, size, is_fixed, kernel):
    inputs = make(form, tokens, size)
    found = ops_of(kernel, is_fixed=is_fixed).fp8_expert_mlp(*inputs)
    assert error(found, byte_reference.expert_mlp(*inputs)) < TOLERANCE


@pytest.mark.parametrize("kernel", ["cuda", "triton"])
@pytest.mark.parametrize("form", FORMS)
def test_a_fixed_result_of_a_token_does_not_depend_on_other_tokens(form, kernel):
    x, weights, ids, gate_up, down = make(form, 130, "qwen3")
    ops = ops_of(kernel, is_fixed=True)
    whole = ops.fp8_expert_mlp(x, weights, ids, gate_up, down)
    for row in (0, 77, 129):
        one = slice(row, row + 1)
        alone = ops.fp8_expert_mlp(x[one], weights[one], ids[one], gate_up, down)
        assert alone.equal(whole[one])


@pytest.mark.parametrize("kernel", ["cuda", "triton"])
@pytest.mark.parametrize("form", FORMS)
def test_experts_are_captured_in_a_graph(form, kernel):
    x, weights, ids, gate_up, down = make(form, 16, "qwen3")
    ops = ops_of(kernel)
    ops.fp8_expert_mlp(x, weights, ids, gate_up, down)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ops.fp8_expert_mlp(x, weights, ids, gate_up, down)
    ids.copy_(ids.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert found.equal(ops.fp8_expert_mlp(x, weights, ids, gate_up, down))


@pytest.mark.parametrize(
    "form", ["fp8-blocks", "fp8-tensor-static", "compressed-channel-token"]
)
def test_layers_of_experts_give_the_results_of_the_cpu(form, tmp_path):
    folder = checkpoints.make(tmp_path, form, models.expert_configs()["qwen3-moe"])
    ours = model_of(folder, DEVICE, torch.bfloat16)
    theirs = model_of(folder, torch.device("cpu"), torch.float32)
    path = "layers.1.mlp.experts"
    x = torch.randn((40, 240), dtype=torch.bfloat16)
    weights, ids = torch.rand(40, 6).topk(3)
    found = ours.get_submodule(path).forward(x.cuda(), weights.cuda(), ids.int().cuda())
    expected = theirs.get_submodule(path).forward(x.float(), weights, ids.int())
    assert error(found.cpu(), expected) < TOLERANCE
