"""All families on four ranks, cut and in stages, against transformers' whole models."""

from __future__ import annotations

import pytest
import torch

from tests.models.families import family_configs, one_of_each_family
from tests.models.group_run import serve
from tests.models.layouts import LAYOUTS
from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.worker.parallel.tensor_parallel import ExpertRanks

CONFIGS = family_configs()


@pytest.mark.matrix(keep=8)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_family_over_four_ranks_gives_what_transformers_does(name, tensor_group, checkpoint):
    config = CONFIGS[name]
    folder, on_rank_0 = checkpoint(config)
    has_experts = hasattr(config, "num_experts_per_tok")
    ours = models.load_ours(
        folder,
        tensor_group,
        ops=CpuOps(load_library(), torch.float32, 1),
        # Two parts of experts, each expert in two halves.
        experts=ExpertRanks(2 if has_experts else 1),
    )
    prompts = models.prompts(1, 23)

    outputs = PagedRun(ours, 2).greedy(prompts, 8)
    logits = PagedRun(ours, 1).logits({0: prompts[1]})

    assert outputs == on_rank_0(lambda theirs: models.reference_greedy(theirs, prompts, 8))
    expected = on_rank_0(lambda theirs: theirs(torch.tensor([prompts[1]])).logits[0].detach())
    torch.testing.assert_close(logits, expected, atol=3e-5, rtol=1e-4)


@pytest.mark.matrix(keep=6)
@pytest.mark.parametrize("name", one_of_each_family())
def test_a_family_is_served_over_two_stages_of_two_ranks(name, world, checkpoint):
    folder, on_rank_0 = checkpoint(CONFIGS[name])
    prompts = models.prompts(1, 28, 61)

    answers = serve(world, folder, LAYOUTS["tp2·pp2"], prompts, 6)

    expected = on_rank_0(lambda theirs: models.reference_greedy(theirs, prompts, 6))
    if world.rank == 0:
        assert [answer.token_ids for answer in answers] == expected
