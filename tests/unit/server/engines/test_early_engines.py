"""A follower accepts engines of models that the first front end has not announced yet."""

from __future__ import annotations

import asyncio

from trimaran.comm.messages.messages import StatsReport

FOLLOWER = {"index": 1, "num_frontends": 2}


async def test_an_engine_that_connects_before_its_model_exists_serves_later(serve):
    async with serve(FOLLOWER) as served:
        engine = await served.dial(lambda submit: [1], group="late")
        engine.send(StatsReport(values={"active_requests": 1.0}))
        await asyncio.sleep(0.05)
        assert not served.engines.is_known("late")
        engines = served.engines.add_model("tensorrt_llm", "1", 2, ["late"])
        assert engines.is_ready
        assert served.engines.is_known("late")


async def test_the_newest_of_two_early_engine_incarnations_serves(serve):
    async with serve(FOLLOWER) as served:
        await served.dial(lambda submit: [1], group="late", incarnation=0)
        await served.dial(lambda submit: [1], group="late", incarnation=1)
        engines = served.engines.add_model("tensorrt_llm", "1", 2, ["late"])
        assert engines.groups["late"].incarnation == 1


async def test_an_early_engine_that_dies_is_removed(serve):
    async with serve(FOLLOWER) as served:
        engine = await served.dial(lambda submit: [1], group="late")
        await engine.end()
        await engine.until(lambda: not served.engines._early)
        assert not served.engines.add_model("tensorrt_llm", "1", 2, ["late"]).is_ready
