"""Several keys of config.json together, served by engines that cut, pause and find prompts."""

from __future__ import annotations

import pytest
import torch

from tests.models.drawn import drawn
from tests.models.field_cases import SERVED
from tests.models.group_run import HAS_GPUS, ask, run_group
from trimaran.comm import mpi

NUM_TOKENS = 6
TOLERANCE = 1e-4
"""Some draws multiply what is rounded: Gemma's, by what it divides scores by."""

DRAWS = 3 if mpi.MPI.COMM_WORLD.Get_size() == 1 else 1


@torch.inference_mode()
def logits_of(theirs, prompt, output):
    """Those that each token of an output would be chosen from, computed without a cache."""
    rows = [
        theirs(torch.tensor([prompt + output[:count]])).logits[0, -1]
        for count in range(len(output))
    ]
    return torch.stack(rows).float()


@pytest.mark.mpi
@pytest.mark.skipif(HAS_GPUS, reason="the bound is that of a CPU's rounding")
@pytest.mark.parametrize("number", range(DRAWS))
@pytest.mark.parametrize("name", list(SERVED))
def test_logits_of_a_drawn_configuration_are_those_of_transformers(
    name, number, world, tmp_path
):
    case = drawn(name, number, world.size, tmp_path) if world.rank == 0 else None
    config = world.comm.bcast(case and case.config)

    def asked_twice(driver):
        wants = {"return_context_logits": False}
        return [ask(driver, case.prompts, NUM_TOKENS, **wants) for _ in range(2)]

    answers = run_group(world, config, asked_twice)

    if world.rank == 0:
        for round_ in answers:
            for prompt, answer in zip(case.prompts, round_, strict=True):
                expected = logits_of(case.theirs, prompt, answer.token_ids)
                logits = answer.chosen_from(case.values["vocab_size"])
                torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=1e-4)
                assert logits.argmax(-1).tolist() == answer.token_ids
