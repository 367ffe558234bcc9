"""Models cut over real ranks against transformers' whole ones."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from trimaran.comm.collectives import TensorParallelGroup, connect_group
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu import CpuOps
from trimaran.kernels.torch_ops import TorchOps
from trimaran.worker.layers.parallel import ExpertRanks

_PATH = Path(__file__).parents[1] / "unit" / "models" / "models.py"
_SPEC = importlib.util.spec_from_file_location("models", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
models = importlib.util.module_from_spec(_SPEC)
sys.modules["models"] = models
_SPEC.loader.exec_module(models)

CONFIGS = {
    "llama": models.llama_config(),
    "llama-tied": models.llama_config(tie_word_embeddings=True),
    "llama-fewer-kv-heads-than-ranks": models.llama_config(num_key_value_heads=1),
    "llama-biases": models.llama_config(attention_bias=True, mlp_bias=True),
    "llama-rope-llama3": models.llama_config(rope_parameters=models.LLAMA3_ROPE),
    "gpt2": models.gpt2_config(),
    "gpt2-untied": models.gpt2_config(tie_word_embeddings=False),
}
LATENT = models.latent_configs()
FAMILIES = {
    **models.dense_configs(),
    **models.parallel_configs(),
    "deepseek2": LATENT["deepseek2"],
}
EXPERTS = {**models.expert_configs(), "deepseek3": LATENT["deepseek3"]}
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


@pytest.fixture
def checkpoint(world):
    """Makes a checkpoint on rank 0: its folder and transformers' model of it, on every rank."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(world.comm.bcast(own))

        def make(name, dtype=torch.float32):
            config = {**CONFIGS, **FAMILIES, **EXPERTS}[name]
            if world.rank == 0:
                theirs = models.save_huggingface(folder, config, dtype=dtype)
            world.barrier(60.0, "saved")
            if world.rank != 0:
                theirs = models.load_huggingface(folder, config, dtype=dtype)
            return folder, theirs

        yield make
        world.barrier(60.0, "read by all")


@pytest.fixture(params=list(OPS))
def ops_of(request):
    """The operators under test, by dtype."""
    return OPS[request.param]


@pytest.mark.parametrize("name", list(CONFIGS))
def test_greedy_tokens_in_float32_are_those_of_transformers(name, group, ops_of, checkpoint):
    folder, theirs = checkpoint(name)
    ours = models.load_ours(folder, group, ops=ops_of(torch.float32))
    prompts = models.prompts(1, 4, 5, 23)

    outputs = models.PagedRun(ours, 4).greedy(prompts, 12)

    assert outputs == models.reference_greedy(theirs, prompts, 12)


@pytest.mark.parametrize("group", ["one_host"], indirect=True)
@pytest.mark.parametrize("ops_of", ["cpu kernels"], indirect=True)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_is_cut_without_changing_a_token(name, group, ops_of, checkpoint):
    folder, theirs = checkpoint(name)
    ours = models.load_ours(folder, group, ops=ops_of(torch.float32))
    prompts = models.prompts(1, 5, 23)

    outputs = models.PagedRun(ours, 3).greedy(prompts, 8)

    assert outputs == models.reference_greedy(theirs, prompts, 8)


@pytest.mark.parametrize("name", ["llama", "llama-fewer-kv-heads-than-ranks", "gpt2", "neox"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_half_precision_are_within_rounding_of_float32(
    name, dtype, group, ops_of, checkpoint
):
    folder, theirs = checkpoint(name, dtype)
    ours = models.load_ours(folder, group, dtype=dtype, ops=ops_of(dtype))
    (prompt,) = models.prompts(40)

    logits = models.PagedRun(ours, 1).logits({0: prompt})

    expected = theirs(torch.tensor([prompt])).logits[0].detach().float()
    exact = theirs.float()(torch.tensor([prompt])).logits[0].detach()
    # Partial sums are rounded once more than transformers' own.
    assert (logits - exact).abs().max() <= 2 * (expected - exact).abs().max()


def test_logits_are_the_same_bits_on_every_rank(group, world, ops_of, checkpoint):
    folder, _ = checkpoint("llama")
    ours = models.load_ours(folder, group, ops=ops_of(torch.float32))
    (prompt,) = models.prompts(11)

    logits = models.PagedRun(ours, 1).logits({0: prompt})

    assert len(set(world.comm.allgather(logits.numpy().tobytes()))) == 1


@pytest.mark.parametrize("name", [
    "mixtral", "qwen2-moe-normalised-mixed", "qwen3-moe", "deepseek3",
])  # fmt: skip
@pytest.mark.parametrize("moe_ep_size", [1, 2])
def test_experts_may_be_cut_or_shared_out(name, moe_ep_size, group, checkpoint):
    folder, theirs = checkpoint(name)
    ops = OPS["cpu kernels"](torch.float32)
    ours = models.load_ours(folder, group, ops=ops, experts=ExpertRanks(moe_ep_size))
    prompts = models.prompts(2, 23)

    outputs = models.PagedRun(ours, 2).greedy(prompts, 5)
    logits = models.PagedRun(ours, 1).logits({0: prompts[1]})

    assert outputs == models.reference_greedy(theirs, prompts, 5)
    expected = theirs(torch.tensor([prompts[1]])).logits[0].detach()
    torch.testing.assert_close(logits, expected, atol=3e-5, rtol=1e-4)
