"""Requests with every feature drawn at random over pipeline stages, a third of them killed."""

from __future__ import annotations

import random

from tests.mpi.test_pipeline import HAS_GPUS, make_ranks
from tests.unit.worker.engine.test_every_feature import (
    draw,
    make_adapters,
    make_engine,
    outputs_of,
    run_all,
)
from trimaran.worker.config.engine_config import ParallelConfig

NUM_REQUESTS, NUM_ALONE = 90, 20
DEVICE = "cuda" if HAS_GPUS else "cpu"


def test_every_feature_at_once_gives_what_one_rank_gives_alone(world):
    rng = random.Random(5)
    parallel = ParallelConfig(pp_size=2, tp_size=world.size // 2)
    asked = []
    if world.rank == 0:
        adapters = make_adapters()
        asked = [draw(rng, adapters) for _ in range(NUM_REQUESTS)]

    ranks = make_ranks(world, pp_size=2)
    driver = make_engine(0, 1024, parallel, ranks.ties, DEVICE)
    killed = ranks.run(driver, lambda driver: run_all(driver, asked, rng))

    if world.rank == 0:
        driver.check_idle()
        assert driver.engine._adapters.num_used == 0
        alone = make_engine(1, 1024, device=DEVICE)
        whole = [request for request in range(1, NUM_REQUESTS + 1) if request not in killed]
        for request in rng.sample(whole, NUM_ALONE):
            fields = asked[request - 1]
            again = alone.submit(**fields)
            alone.run(max_steps=100_000)
            assert outputs_of(alone, again, fields) == outputs_of(driver, request, fields)
