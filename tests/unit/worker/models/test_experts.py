"""Models with experts against transformers on the same weights, and how they are refused."""

from __future__ import annotations

import pytest
import torch

from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun, logits_alone_and_beside
from trimaran.comm.errors import ConfigError
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.worker.config.engine_folder import EngineFolder, check_parallel_sizes
from trimaran.worker.parallel.tensor_parallel import ExpertRanks, ShardPosition

CONFIGS = {**models.expert_configs(), **models.sink_configs()}


@pytest.mark.matrix(keep=7)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_tokens_and_logits_in_float32_are_those_of_transformers(name, tmp_path, ops_of):
    theirs = models.save_huggingface(tmp_path, CONFIGS[name])
    ours = models.load_ours(tmp_path, ops=ops_of(torch.float32))
    prompts = models.prompts(1, 5, 37)

    outputs = PagedRun(ours, 3).greedy(prompts, 12)
    logits = PagedRun(ours, 1).logits({0: prompts[2]})

    assert outputs == models.reference_greedy(theirs, prompts, 12)
    expected = theirs(torch.tensor([prompts[2]])).logits[0].detach()
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "gpt-oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_half_precision_are_within_rounding_of_float32(name, dtype, tmp_path, ops_of):
    theirs = models.save_huggingface(tmp_path, CONFIGS[name], dtype=dtype)
    ours = models.load_ours(tmp_path, dtype=dtype, ops=ops_of(dtype))
    (prompt,) = models.prompts(40)

    logits = PagedRun(ours, 1).logits({0: prompt})

    expected = theirs(torch.tensor([prompt])).logits[0].detach().float()
    exact = theirs.float()(torch.tensor([prompt])).logits[0].detach()
    # A token's choice of experts may turn on a rounding, here and there: not most tokens'.
    ours_off, theirs_off = (
        (each - exact).abs().amax(-1).median() for each in (logits, expected)
    )
    assert ours_off <= 1.5 * theirs_off


@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_logits_on_the_cpu_do_not_depend_on_the_batch(name, dtype, tmp_path):
    models.save_huggingface(tmp_path, CONFIGS[name], dtype=dtype)
    ours = models.load_ours(tmp_path, dtype=dtype, ops=CpuOps(load_library(), dtype, 1))

    alone, beside = logits_alone_and_beside(ours)

    assert beside.equal(alone)


def test_ranks_hold_their_experts_and_their_parts_of_them(tmp_path):
    models.save_huggingface(tmp_path, CONFIGS["mixtral"])
    whole = models.load_ours(tmp_path).layers["2"].mlp.experts
    gate, up = whole.gate_up.chunk(2, dim=1)

    for rank in range(4):
        place = ShardPosition(rank, 4)
        part = models.load_ours(tmp_path, place, experts=ExpertRanks(2), is_finished=False)
        experts = part.layers["2"].mlp.experts
        mine, rows = (
            slice(rank % 2 * 3, rank % 2 * 3 + 3),
            slice(rank // 2 * 14, rank // 2 * 14 + 14),
        )
        assert experts.gate_up.equal(torch.cat((gate[mine, rows], up[mine, rows]), dim=1))
        assert experts.down.equal(whole.down[mine, :, rows])


@pytest.mark.parametrize(
    ("name", "tp", "ep", "words"),
    [
        ("mixtral", 4, 4, r"num_experts \(6\) is not a multiple of moe_ep_size \(4\)"),
        ("dense", 2, 2, "no experts to share out"),
    ],
)
def test_experts_that_cannot_be_divided_between_ranks_are_refused(
    tmp_path, name, tp, ep, words
):
    config = CONFIGS.get(name) or models.llama_config()
    config.save_pretrained(tmp_path)
    values = {"architectures": None, "tie_word_embeddings": False}
    models.edit_config(tmp_path, **values)
    folder = EngineFolder.load(tmp_path, check_weights=False)

    with pytest.raises(ConfigError, match=words):
        check_parallel_sizes(folder.config, tp, 1, ep)
