"""Requests with all features, drawn at random, over data-parallel ranks; a third are killed."""

from __future__ import annotations

import random

import pytest

from tests.driver import Ranks
from tests.unit.worker.engine.test_every_feature import (
    draw,
    make_adapters,
    make_engine,
    outputs_of,
    run_all,
)
from trimaran.worker.config.engine_config import ParallelConfig


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize(("num_requests", "num_alone"), [(30, 8), (60, 15)])
@pytest.mark.ranks(2)
def test_all_features_together_give_the_tokens_of_one_rank(world, num_requests, num_alone):
    rng = random.Random(6)
    parallel = ParallelConfig(dp_size=2, tp_size=world.size // 2)
    asked = []
    if world.rank == 0:
        adapters = make_adapters()
        asked = [draw(rng, adapters) for _ in range(num_requests)]

    ranks = Ranks(world, parallel)
    driver = make_engine(0, 1024, parallel, ranks.ties)
    killed = ranks.run(driver, lambda driver: run_all(driver, asked, rng))

    engine = driver.engine
    if world.rank == 0:
        assert not engine._requests and not engine.scheduler.has_requests
        for rank in engine.scheduler.ranks:
            rank.cache.check([])
            assert rank.cache.num_free == rank.cache.num_blocks
            assert len(rank.rows.free) == rank.config.max_num_seqs
        assert [rank.num_used for rank in engine._adapters.ranks] == [0, 0]
        alone = make_engine(1, 1024)
        whole = [request for request in range(1, num_requests + 1) if request not in killed]
        for request in rng.sample(whole, num_alone):
            fields = asked[request - 1]
            again = alone.submit(**fields)
            alone.run(max_steps=100_000)
            assert outputs_of(alone, again, fields) == outputs_of(driver, request, fields)
