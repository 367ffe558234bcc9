"""Models cut over real ranks: every transport and operator, half precision, the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.families import family_configs
from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun
from tests.unit.worker.quantization import integer_checkpoints
from tests.unit.worker.quantization.integer_checkpoints import FORMS
from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.collectives.tensor_group import TensorParallelGroup
from trimaran.kernels import reference
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.kernels.torch_ops import TorchOps
from trimaran.worker.models.first_layer_table import make_first_layer_table
from trimaran.worker.parallel.tensor_parallel import ExpertRanks

CONFIGS = family_configs()
OPS = {
    "torch": lambda dtype: TorchOps(),
    "cpu kernels": lambda dtype: CpuOps(load_library(), dtype, 1),
}


@pytest.fixture(scope="module", params=["one_host", "two_hosts"])
def group(request, world, two_host_world) -> TensorParallelGroup:
    """The tensor group of all ranks, over shared memory or as between hosts."""
    chosen = world if request.param == "one_host" else two_host_world
    group = connect_group(chosen, torch.device("cpu"), timeout_s=60.0)
    yield group
    world.barrier(60.0, "end of a module")
    group.close()


@pytest.fixture(params=list(OPS))
def ops_of(request):
    """The operators under test, by dtype."""
    return OPS[request.param]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["llama-tied-biases", "gpt2"])
def test_greedy_tokens_in_float32_are_those_of_transformers(name, group, ops_of, checkpoint):
    folder, on_rank_0 = checkpoint(CONFIGS[name])
    ours = models.load_ours(folder, group, ops=ops_of(torch.float32))
    prompts = models.prompts(1, 4, 5, 23)

    outputs = PagedRun(ours, 4).greedy(prompts, 12)

    assert outputs == on_rank_0(lambda theirs: models.reference_greedy(theirs, prompts, 12))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["llama-one-kv-head-rope-llama3", "gemma2", "mixtral"])
def test_each_rank_looks_up_its_own_heads_of_the_first_product(
    name, tensor_group, world, checkpoint
):
    folder, on_rank_0 = checkpoint(CONFIGS[name])
    ours = models.load_ours(folder, tensor_group, ops=TorchOps())
    make_first_layer_table(ours, 64)
    prompts = models.prompts(2, 23)

    outputs = PagedRun(ours, 2).greedy(prompts, 6)

    assert outputs == on_rank_0(lambda theirs: models.reference_greedy(theirs, prompts, 6))
    assert len(set(world.comm.allgather(ours.first_layer_table.numpy().tobytes()))) > 1


class SumThenNorm:
    """Sums rows and then normalises them, for steps of a few tokens."""

    def __init__(self, group):
        self._group = group
        self.num_calls = 0

    def takes(self, residual_TD):
        return residual_TD.shape[0] <= 2

    def __call__(self, x, residual_TD, weight_D, eps):
        self.num_calls += 1
        return reference.add_rms_norm(self._group.all_reduce(x), residual_TD, weight_D, eps)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_sums_may_be_deferred_to_the_next_norm(name, monkeypatch, tensor_group, checkpoint):
    folder, on_rank_0 = checkpoint(CONFIGS[name])
    ours = models.load_ours(folder, tensor_group, ops=TorchOps())
    prompts = models.prompts(2, 5)
    sums = SumThenNorm(tensor_group)
    monkeypatch.setattr(tensor_group, "sum_norm", sums)

    outputs = PagedRun(ours, 2).greedy(prompts, 6)

    assert outputs == on_rank_0(lambda theirs: models.reference_greedy(theirs, prompts, 6))
    # Norms behind attention and MLP leave nothing to wait for.
    assert (sums.num_calls > 0) is (name != "gemma2")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["llama", "llama-one-kv-head-rope-llama3", "gpt2", "neox"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_half_precision_are_within_rounding_of_float32(
    name, dtype, tensor_group, checkpoint
):
    folder, on_rank_0 = checkpoint(CONFIGS[name], dtype)
    ops = OPS["cpu kernels"](dtype)
    ours = models.load_ours(folder, tensor_group, dtype=dtype, ops=ops)
    (prompt,) = models.prompts(40)

    logits = PagedRun(ours, 1).logits({0: prompt})

    def ask(theirs):
        rounded = theirs(torch.tensor([prompt])).logits[0].detach().float()
        return rounded, theirs.float()(torch.tensor([prompt])).logits[0].detach()

    expected, exact = on_rank_0(ask)
    # Partial sums are rounded once more than transformers' own.
    assert (logits - exact).abs().max() <= 2 * (expected - exact).abs().max()


@pytest.mark.ranks(4)
def test_logits_are_the_same_bits_on_every_rank(group, world, ops_of, checkpoint):
    folder, _ = checkpoint(CONFIGS["llama"])
    ours = models.load_ours(folder, group, ops=ops_of(torch.float32))
    (prompt,) = models.prompts(11)

    logits = PagedRun(ours, 1).logits({0: prompt})

    assert len(set(world.comm.allgather(logits.numpy().tobytes()))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "form"), [("mixtral", "gptq-desc-act"), ("qwen3-moe", "awq")])
@pytest.mark.parametrize("moe_ep_size", [1, 2])
def test_experts_of_integers_are_cut_as_floats_are(
    name, form, moe_ep_size, tensor_group, world, tmp_path
):
    if world.rank == 0:
        integer_checkpoints.make(tmp_path, FORMS[form], CONFIGS[name])
    folder = Path(world.comm.bcast(str(tmp_path)))
    ops = OPS["cpu kernels"](torch.float32)
    experts = ExpertRanks(moe_ep_size)
    ours = models.load_ours(folder / "quantized", tensor_group, ops=ops, experts=experts)
    (prompt,) = models.prompts(23)

    outputs = PagedRun(ours, 2).greedy([prompt], 5)

    expected = None
    if world.rank == 0:
        theirs = models.load_huggingface(folder / "floats", CONFIGS[name])
        expected = models.reference_greedy(theirs, [prompt], 5)
    assert outputs == world.comm.bcast(expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe-normalised-mixed", "deepseek3"])
@pytest.mark.parametrize("moe_ep_size", [1, 2])
def test_experts_may_be_tensor_parallel_or_expert_parallel(
    name, moe_ep_size, tensor_group, checkpoint
):
    folder, on_rank_0 = checkpoint(CONFIGS[name])
    ops = OPS["cpu kernels"](torch.float32)
    experts = ExpertRanks(moe_ep_size)
    ours = models.load_ours(folder, tensor_group, ops=ops, experts=experts)
    prompts = models.prompts(2, 23)

    outputs = PagedRun(ours, 2).greedy(prompts, 5)
    logits = PagedRun(ours, 1).logits({0: prompts[1]})

    assert outputs == on_rank_0(lambda theirs: models.reference_greedy(theirs, prompts, 5))
    expected = on_rank_0(lambda theirs: theirs(torch.tensor([prompts[1]])).logits[0].detach())
    torch.testing.assert_close(logits, expected, atol=3e-5, rtol=1e-4)
