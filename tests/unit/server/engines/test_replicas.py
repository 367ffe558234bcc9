"""Several groups of one model: routing, and the requests of groups that end."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import asynccontextmanager
from functools import partial

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.server.models.conftest import FACTS, ScriptedEngine
from trimaran.comm.errors import EngineDeadError, ErrorKind, RequestError
from trimaran.comm.messages.messages import StatsReport
from trimaran.comm.messages.token_ids import pack_ids, unpack_ids

MODEL = "replicated"


def count_up(submit):
    """A script: the ids that follow the prompt's last one."""
    last = int(unpack_ids(submit.prompt_ids)[-1])
    return [(last + 1 + index) % 600 for index in range(500)]


class Replicas:
    """The groups a, b, ... of a model, and requests to them."""

    def __init__(self, served, count, generation=1):
        self.served = served
        self.names = [chr(ord("a") + index) for index in range(count)]
        if generation > 1:
            self.names = [f"{name}@{generation}" for name in self.names]
        self.model = served.engines.add_model(MODEL, "1", generation, self.names)
        self.engines = {}

    async def dial(self, name, incarnation=0, *, is_open=False, **facts):
        """The next incarnation of a group, without tokens until its gate opens."""
        engine = ScriptedEngine(count_up)
        self.served.dialled.append(engine)
        hello = self.served.hello(
            model=MODEL, group=name, incarnation=incarnation, facts={**FACTS, **facts}
        )
        if not is_open:
            engine.gate.clear()
        answer = await engine.dial(self.served.config.engine_listen[0], hello)
        assert answer.accepted, answer.reason
        self.engines[name] = engine
        return engine

    async def dial_all(self, **options):
        return [await self.dial(name, **options) for name in self.names]

    def submit(self, prompt, max_tokens=40):
        return self.model.submit(
            prompt_ids=pack_ids(prompt), sampling={"max_tokens": max_tokens}, streaming=True
        )

    def state(self, name, state, num_restarts=0, **fields):
        self.served.engines.on_group_state(
            group=name, state=state, num_restarts=num_restarts, model=MODEL, **fields
        )

    def owed(self):
        """The outstanding work of the groups: context and output tokens of each."""
        loads = [group.load for group in self.model.groups.values()]
        return [(load.context_tokens, load.output_tokens) for load in loads]

    async def submitted(self, **counts):
        """Return once each engine has got so many requests."""
        engines = self.engines
        await next(iter(engines.values())).until(
            lambda: {n: len(engines[n].submits) for n in counts} == counts
        )


async def read(request):
    """All ids of a request."""
    news = asyncio.Event()
    request.on_output = news.set
    ids = []
    while True:
        while not request.has_output:
            news.clear()
            await news.wait()
        chunk = request.take()
        ids += chunk.token_ids
        if chunk.is_last:
            return ids


@pytest.fixture
def replicas(serve):
    """Builds a model of so many groups; options are fields of the front end's configuration."""

    @asynccontextmanager
    async def start(count, **fields):
        async with serve(frontend={"max_replays": 100, **fields}) as served:
            yield Replicas(served, count)

    return start


def samples(served, model=MODEL):
    """The value of every series of a model, by name and remaining labels."""
    families = text_string_to_metric_families(served.metrics.render().decode())
    values = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = dict(sample.labels)
        if labels.pop("model", None) == model:
            del labels["version"]
            values[(sample.name, *sorted(labels.values()))] = sample.value
    return values


# ---- routing ----------------------------------------------------------------------------


async def test_a_group_with_a_long_output_to_generate_gets_fewer_requests(replicas):
    async with replicas(2) as group:
        await group.dial_all()
        requests = [group.submit([1], 300)]
        requests += [group.submit([2 + index], 50) for index in range(5)]
        await group.submitted(a=1, b=5)
        for engine in group.engines.values():
            engine.gate.set()
        for request in requests:
            assert await read(request) == count_up(request.submit)[: request.max_tokens]


async def test_a_conversation_continues_at_the_group_that_cached_its_history(replicas):
    async with replicas(2) as group:
        a, b = await group.dial_all(is_open=True, reuses_blocks=True, tokens_per_block=4)
        talks = [[index] * 30 for index in range(6)]
        for turn in range(5):
            for talk in talks:
                talk += await read(group.submit(talk, 10))
                talk += [turn]
        homes = {}
        for name, engine in (("a", a), ("b", b)):
            for submit in engine.submits:
                first = int(unpack_ids(submit.prompt_ids)[0])
                homes.setdefault(first, set()).add(name)
        assert all(len(home) == 1 for home in homes.values())
        assert len(a.submits) == len(b.submits) == 15


@pytest.mark.parametrize(
    ("routing", "reuses_blocks", "follows"),
    [("auto", True, True), ("auto", False, False), ("least_loaded", True, False),
     ("prefix_aware", True, True)],
)  # fmt: skip
async def test_prompts_are_routed_by_prefix_for_engines_with_block_reuse(
    replicas, routing, reuses_blocks, follows
):
    async with replicas(2, routing=routing) as group:
        options = {"reuses_blocks": reuses_blocks, "tokens_per_block": 4}
        a, b = await group.dial_all(is_open=True, **options)
        for _ in range(6):
            await read(group.submit([7] * 40, 4))
        counts = {len(a.submits), len(b.submits)}
        assert counts == ({0, 6} if follows else {3})


async def test_a_restarted_group_has_no_cached_prefixes(replicas):
    async with replicas(2) as group:
        facts = {"reuses_blocks": True, "tokens_per_block": 4}
        a, b = await group.dial_all(is_open=True, **facts)
        await read(group.submit([7] * 40, 4))
        assert (len(a.submits), len(b.submits)) == (1, 0)
        await a.end()
        await b.until(lambda: group.model.groups["a"].link is None)
        a = await group.dial("a", 1, is_open=True, **facts)
        await read(group.submit([7] * 40, 4))
        assert (len(a.submits), len(b.submits)) == (0, 1)


@pytest.mark.parametrize("seed", range(6))
async def test_the_estimated_load_of_groups_returns_to_zero(replicas, seed):
    draw = random.Random(seed)
    facts = {"reuses_blocks": True, "tokens_per_block": 4}
    async with replicas(3) as group:
        await group.dial_all(is_open=True, **facts)
        incarnations = dict.fromkeys(group.names, 0)
        tasks, kept = [], []
        for _ in range(60):
            await asyncio.sleep(draw.choice([0, 0, 0.002]))
            request = group.submit([draw.randrange(3)] * draw.randint(1, 20), 60)
            if draw.random() < 0.3:
                asyncio.get_running_loop().call_later(draw.uniform(0, 0.01), request.abandon)
            else:
                kept.append(request)
                tasks.append(asyncio.ensure_future(read(request)))
            if draw.random() < 0.15:
                name = draw.choice(group.names)
                await group.engines[name].end()
                await group.served.dialled[0].until(
                    lambda name=name: group.model.groups[name].link is None
                )
                incarnations[name] += 1
                await group.dial(name, incarnations[name], is_open=True, **facts)
        for request, task in zip(kept, tasks, strict=True):
            assert await task == count_up(request.submit)[:60]
        await group.served.dialled[0].until(lambda: group.owed() == [(0, 0)] * 3)
        assert not any(each.live for each in group.model.groups.values())


async def die_and_return(group, name, incarnation, draw):
    """A group dies and comes back; supervisor and sockets say so in any order."""

    async def say(state, num_restarts):
        group.state(name, state, num_restarts)

    following = incarnation + 1
    words = [("down", incarnation), ("starting", following), ("up", following)]
    queues = [
        [partial(say, *word) for word in words],
        [group.engines[name].end, partial(group.dial, name, following, is_open=True)],
    ]
    while any(queues):
        await draw.choice([queue for queue in queues if queue]).pop(0)()
    await group.engines[name].until(lambda: group.model.groups[name].link is not None)


@pytest.mark.parametrize("seed", range(8))
async def test_a_death_reported_by_supervisor_and_socket_counts_once_in_any_order(
    replicas, seed
):
    draw = random.Random(seed)
    async with replicas(2) as group:
        await group.dial_all(is_open=True)
        incarnations = dict.fromkeys(group.names, 0)
        requests, tasks = [], []
        for _ in range(6):
            for _ in range(4):
                requests.append(group.submit([draw.randrange(100)], 90))
                tasks.append(asyncio.ensure_future(read(requests[-1])))
            await asyncio.sleep(draw.choice([0, 0.003]))
            name = draw.choice(group.names)
            await die_and_return(group, name, incarnations[name], draw)
            incarnations[name] += 1
        for request, task in zip(requests, tasks, strict=True):
            assert await task == count_up(request.submit)[:90]
        await group.served.dialled[0].until(lambda: group.owed() == [(0, 0)] * 2)


# ---- deaths -----------------------------------------------------------------------------


async def test_requests_of_a_dead_group_spread_over_all_running_groups(replicas):
    async with replicas(3) as group:
        await group.dial_all()
        requests = [group.submit([index]) for index in range(12)]
        await group.submitted(a=4, b=4, c=4)
        assert samples(group.served)["trimaran_group_requests", "a"] == 4
        await group.engines["a"].end()
        await group.submitted(b=6, c=6)
        assert samples(group.served)["trimaran_group_requests", "a"] == 0
        assert samples(group.served)["trimaran_group_requests", "b"] == 6
        assert samples(group.served)["trimaran_replayed_requests_total",] == 4
        for name in ("b", "c"):
            group.engines[name].gate.set()
        for index, request in enumerate(requests):
            assert await read(request) == list(range(index + 1, index + 41))


async def test_requests_leave_a_group_at_the_down_report_of_the_supervisor(
    replicas,
):
    async with replicas(2) as group:
        a, b = await group.dial_all()
        requests = [group.submit([index]) for index in range(2)]
        await group.submitted(a=1, b=1)
        a.step()
        await a.until(lambda: requests[0].output_ids == [1])
        group.state("a", "down", text="rank 1 was killed by signal 9")
        b.gate.set()
        for index, request in enumerate(requests):
            assert await read(request) == list(range(index + 1, index + 41))
        assert [len(unpack_ids(submit.output_ids)) for submit in b.submits] == [0, 1]
        assert samples(group.served)["trimaran_group_up", "a"] == 0


async def test_an_old_incarnation_of_a_dead_group_may_not_reconnect(replicas):
    async with replicas(1) as group:
        await group.dial("a", 2)
        group.state("a", "down", 2)
        stranger = ScriptedEngine(count_up)
        hello = group.served.hello(model=MODEL, group="a", incarnation=2)
        answer = await stranger.dial(group.served.config.engine_listen[0], hello)
        await stranger.end()
        assert answer.reason == "incarnation 2 is being ended"
        group.state("a", "starting", 3)
        await group.dial("a", 3)
        assert group.model.is_ready


async def test_a_down_report_of_the_only_group_makes_the_model_unready_at_once(replicas):
    async with replicas(1) as group:
        await group.dial("a")
        assert group.model.is_ready
        group.state("a", "down")
        assert not group.model.is_ready
        with pytest.raises(EngineDeadError, match=r"not at ready state.*try again") as got:
            group.submit([1])
        assert got.value.kind is ErrorKind.UNAVAILABLE


async def test_late_reports_of_a_group_do_not_affect_its_next_incarnation(replicas):
    async with replicas(1) as group:
        await group.dial("a", 3, is_open=True)
        group.engines["a"].gate.clear()
        request = group.submit([1])
        for state, num_restarts in (("down", 2), ("starting", 3), ("up", 3), ("failed", 2)):
            group.state("a", state, num_restarts)
            assert group.model.is_ready
        group.engines["a"].gate.set()
        assert await read(request) == list(range(2, 42))
        assert len(group.engines["a"].submits) == 1
        group.state("a", "starting", 4)
        assert not group.model.is_ready


async def test_requests_of_a_failed_group_wait_for_a_group_that_may_restart(replicas):
    async with replicas(2) as group:
        a, b = await group.dial_all()
        requests = [group.submit([index]) for index in range(2)]
        await group.submitted(a=1, b=1)
        for engine in (a, b):
            await engine.end()
        await a.until(lambda: not group.model.is_ready)
        group.state("a", "failed", 3)
        again = await group.dial("b", 1, is_open=True)
        for index, request in enumerate(requests):
            assert await read(request) == list(range(index + 1, index + 41))
        assert len(again.submits) == 2


async def test_requests_fail_at_once_when_the_last_group_fails(replicas):
    async with replicas(2) as group:
        a, b = await group.dial_all()
        requests = [group.submit([index]) for index in range(2)]
        for engine in (a, b):
            await engine.end()
        await a.until(lambda: not group.model.is_ready)
        group.state("a", "failed", 3, text="out of memory")
        group.state("b", "failed", 3, text="rank 0 exited with code 1")
        for request in requests:
            with pytest.raises(EngineDeadError, match=r"not started again: rank 0 ex") as got:
                await read(request)
            assert got.value.kind is ErrorKind.UNAVAILABLE
        assert samples(group.served)["trimaran_lost_requests_total",] == 2
        with pytest.raises(EngineDeadError, match="not started again: out of memory"):
            group.submit([1])
        # The supervisor's last word may be overtaken by a start on an operator's order.
        await group.dial("b", 4, is_open=True)
        assert await read(group.submit([1])) == list(range(2, 42))


async def test_a_failure_that_was_known_before_the_model_counts(serve):
    async with serve() as served:
        state = {"model": MODEL, "state": "failed", "text": "no such folder"}
        served.engines.on_group_state(group="a", **state)
        group = Replicas(served, 1)
        with pytest.raises(EngineDeadError, match="not started again: no such folder"):
            group.submit([1])


async def test_restarts_that_were_known_before_the_model_are_shown(serve):
    async with serve() as served:
        for state, num_restarts in (("starting", 1), ("down", 1), ("up", 2)):
            served.engines.on_group_state(group="a", state=state, num_restarts=num_restarts)
        group = Replicas(served, 1)
        assert samples(served)["trimaran_group_restarts", "a"] == 2
        await group.dial("a", 2, is_open=True)
        assert await read(group.submit([1])) == list(range(2, 42))


async def test_deaths_of_one_model_do_not_affect_another_model(replicas):
    async with replicas(1, max_replays=0) as group:
        other = await group.served.dial(count_up)
        other.gate.clear()
        healthy = asyncio.ensure_future(
            group.served.infer(
                "tensorrt_llm", input_ids=[5], input_lengths=1, request_output_len=20
            )
        )
        await other.until(lambda: len(other.submits) == 1)
        engine = await group.dial("a")
        doomed = group.submit([1])
        await engine.end()
        await group.dial("a", 1)
        with pytest.raises(EngineDeadError, match=r"died 1 times .* \(limit 0\)"):
            await read(doomed)
        other.gate.set()
        (response,) = await healthy
        (ids,) = (o.data for o in response.outputs if o.name == "output_ids")
        assert ids.reshape(-1).tolist() == list(range(5, 26))
        assert len(other.submits) == 1
        assert other.cancelled == []


# ---- generations ------------------------------------------------------------------------


async def test_two_generations_of_a_model_serve_side_by_side(replicas):
    async with replicas(1) as old:
        first = await old.dial("a")
        before = old.submit([1])
        await old.submitted(a=1)
        new = Replicas(old.served, 1, generation=2)
        second = await new.dial("a@2", is_open=True)
        assert await read(new.submit([2])) == list(range(3, 43))
        assert samples(old.served)["trimaran_group_up", "a"] == 1
        assert samples(old.served)["trimaran_group_up", "a@2"] == 1
        first.gate.set()
        assert await read(before) == list(range(2, 42))
        assert (len(first.submits), len(second.submits)) == (1, 1)
        old.model.close()
        assert ("trimaran_group_up", "a") not in samples(old.served)
        assert await read(new.submit([3])) == list(range(4, 44))


async def test_a_death_in_one_generation_never_moves_requests_to_another_generation(replicas):
    async with replicas(1, replay_timeout_s=0.05) as old:
        first = await old.dial("a")
        new = Replicas(old.served, 1, generation=2)
        second = await new.dial("a@2", is_open=True)
        request = old.submit([1])
        await old.submitted(a=1)
        await first.end()
        with pytest.raises(EngineDeadError, match="did not come back"):
            await read(request)
        assert second.submits == []


async def test_a_closed_generation_leaves_nothing_behind(replicas, caplog):
    async with replicas(2) as group:
        nothing = group.served.metrics.render()
        group.model.close()
        without = group.served.metrics.render()
        assert samples(group.served) == {}
        again = Replicas(group.served, 2)
        assert group.served.metrics.render() == nothing
        a, b = await again.dial_all(is_open=True)
        await read(again.submit([1]))
        a.gate.clear()
        b.gate.clear()
        b.send(StatsReport(values={"active_requests": 3}))
        unfinished = again.submit([2])
        await a.until(lambda: len(a.submits) + len(b.submits) == 2)
        caplog.set_level(logging.WARNING)
        caplog.clear()
        again.model.close()
        again.model.close()
        with pytest.raises(RequestError, match="unloaded"):
            await read(unfinished)
        assert group.served.metrics.render() == without
        # Their processes still talk for a moment; the supervisor ends them.
        for engine in (a, b):
            engine.gate.set()
            engine.send(StatsReport(values={"active_requests": 3}))
        await asyncio.sleep(0.02)
        for engine in (a, b):
            await engine.end()
        await asyncio.sleep(0.02)
        assert group.served.metrics.render() == without
        assert [record.getMessage() for record in caplog.records] == []


async def test_statistics_of_groups_are_summed_without_dead_groups(replicas):
    async with replicas(2) as group:
        engines = await group.dial_all()
        for used, engine in zip((10, 30), engines, strict=True):
            engine.send(StatsReport(values={"kv_max_blocks": 100, "kv_used_blocks": used}))
        used = ("nv_trt_llm_kv_cache_block_metrics", "used")
        await engines[0].until(lambda: samples(group.served)[used] == 40)
        assert samples(group.served)["nv_trt_llm_kv_cache_block_metrics", "fraction"] == 0.2
        await engines[1].end()
        await engines[0].until(lambda: samples(group.served)[used] == 10)
