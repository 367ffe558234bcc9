"""Requests with every feature drawn at random over pipeline stages, a third of them killed."""

from __future__ import annotations

import random

import pytest

from tests.mpi.test_pipeline import HAS_GPUS, make_ranks
from tests.unit.worker.engine.test_every_feature import (
    draw,
    make_adapters,
    make_engine,
    outputs_of,
    run_all,
)
from trimaran.worker.config.engine_config import ParallelConfig

DEVICE = "cuda" if HAS_GPUS else "cpu"


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize(("num_requests", "num_alone"), [(40, 10), (90, 20)])
@pytest.mark.ranks(4)
def test_all_features_together_give_the_tokens_of_one_rank(world, num_requests, num_alone):
    rng = random.Random(5)
    parallel = ParallelConfig(pp_size=2, tp_size=world.size // 2)
    asked = []
    if world.rank == 0:
        adapters = make_adapters()
        asked = [draw(rng, adapters) for _ in range(num_requests)]

    ranks = make_ranks(world, pp_size=2)
    driver = make_engine(0, 1024, parallel, ranks.ties, DEVICE)
    killed = ranks.run(driver, lambda driver: run_all(driver, asked, rng))

    if world.rank == 0:
        driver.check_idle()
        assert driver.engine._adapters.num_used == 0
        alone = make_engine(1, 1024, device=DEVICE)
        whole = [request for request in range(1, num_requests + 1) if request not in killed]
        for request in rng.sample(whole, num_alone):
            fields = asked[request - 1]
            again = alone.submit(**fields)
            alone.run(max_steps=100_000)
            assert outputs_of(alone, again, fields) == outputs_of(driver, request, fields)
