"""Every family in every layout of this run's ranks, by the engine, against transformers."""

from __future__ import annotations

import pytest
import torch

from tests.models.families import family_configs
from tests.models.group_run import HAS_GPUS, serve
from tests.models.layouts import LAYOUTS, cases
from tests.unit.worker.models import models
from trimaran.comm import mpi

CONFIGS = family_configs()
NUM_TOKENS = 8
VOCAB = 150
# Within a block, of several, about to outgrow LongRoPE's short factors, and longer than a step
# and any window.
LENGTHS = (1, 5, 28, 61)
TOLERANCE = 3e-5


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request, world, tmp_path_factory):
    """A family's name, its folder, and on rank 0 the answers of transformers."""
    folder, expected = "", None
    if world.rank == 0:
        path = tmp_path_factory.mktemp("model")
        theirs = models.save_huggingface(path, CONFIGS[request.param])
        prompts = models.prompts(*LENGTHS)
        outputs = models.reference_greedy(theirs, prompts, NUM_TOKENS)
        logits = [_logits(theirs, *each) for each in zip(prompts, outputs, strict=True)]
        rounded = [logits[-1]]
        if HAS_GPUS:
            rounded.append(_logits(theirs.to("cuda"), prompts[-1], outputs[-1]).cpu())
        exact = _logits(theirs.to("cpu").double(), prompts[-1], outputs[-1])
        # Some models' own rounding is larger (Gemma 3: 6e-5 from float64).
        rounding = max(float((each - exact).abs().max()) for each in rounded)
        folder, expected = str(path), (outputs, logits, max(TOLERANCE, 2 * rounding))
    return request.param, world.comm.bcast(folder), expected


def _logits(theirs, prompt, output):
    """Logits of a prompt, and of its output token by token, in the order of generation."""
    device = theirs.device
    with torch.inference_mode():
        rows = [theirs(torch.tensor([prompt], device=device)).logits[0]]
        for count in range(1, len(output)):
            ids = torch.tensor([prompt + output[:count]], device=device)
            rows.append(theirs(ids).logits[0, -1:])
    return torch.cat(rows)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("model", "layout"), cases(CONFIGS, mpi.MPI.COMM_WORLD.Get_size()), indirect=["model"]
)
def test_tokens_and_logits_are_those_of_transformers(model, layout, world):
    _, folder, expected = model
    prompts = models.prompts(*LENGTHS)

    answers = serve(world, folder, LAYOUTS[layout], prompts, NUM_TOKENS)

    if world.rank == 0:
        outputs, logits, tolerance = expected
        assert [answer.token_ids for answer in answers] == outputs
        for answer, theirs in zip(answers, logits, strict=True):
            torch.testing.assert_close(answer.logits(VOCAB), theirs, atol=tolerance, rtol=1e-4)
