"""LongRoPE on a GPU: tokens of sequences that outgrow the short factors, step by step."""

from __future__ import annotations

import pytest

from tests.gpu.test_engine import make_driver
from tests.unit.worker.models import models

pytestmark = pytest.mark.gpu

PROMPTS = models.prompts(1, 10, 28, 31, 32, 33, 60)
"""On both sides of the 32 tokens up to which the short factors hold."""
SAMPLINGS = [{"max_tokens": 40}]


@pytest.fixture(scope="module")
def longrope(tmp_path_factory):
    """A folder, and the tokens of the CPU."""
    folder = tmp_path_factory.mktemp("longrope")
    models.save_huggingface(folder, models.longrope_config())
    driver = make_driver(str(folder), "cpu", 1, max_tokens=1024)
    return str(folder), driver.serve(PROMPTS, SAMPLINGS)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_each_sequence_is_rotated_by_its_own_length(longrope, depth, cuda_graphs):
    folder, expected = longrope
    driver = make_driver(folder, "cuda", depth, cuda_graphs, max_tokens=1024)

    # The second run reuses rows that had other positions.
    for _ in range(2):
        assert driver.serve(PROMPTS, SAMPLINGS) == expected
    driver.check_idle()
