"""Loads of token-level models that are cancelled: their groups end, and later loads wait."""

import asyncio

import pytest

from tests.unit.server.started_frontend import write_repository
from trimaran.comm.messages.messages import EngineHello
from trimaran.server.config import FrontendConfig
from trimaran.server.engines.client import EngineClient
from trimaran.server.inference.registry import ModelRegistry
from trimaran.server.loading.group_requests import GroupsRefusedError
from trimaran.server.loading.model_set import ModelSet
from trimaran.server.loading.preparation import (
    BackgroundTasks,
    LoadCancelledError,
    ModelPreparation,
)
from trimaran.server.loading.reader import ReadModel
from trimaran.server.loading.token_groups import TokenGroups
from trimaran.server.metrics.group_board import GroupBoard
from trimaran.server.metrics.metrics import Metrics
from trimaran.server.models.factory import ModelFactory
from trimaran.server.python_models.calls import ModelCalls
from trimaran.server.repository.model_repository import load_model

MODEL = "tensorrt_llm"


class Engine:
    """The connection of an engine that is up and gets no requests."""

    def send(self, message):
        """The group has no reader."""

    def retire(self):
        """The group sends no later events."""


class Supervisor:
    """Has devices for one group, and answers when the test allows."""

    def __init__(self):
        self.running = []
        self.may_answer = asyncio.Event()
        self.may_end = asyncio.Event()

    async def start(self, source, generation):
        if self.running:
            raise GroupsRefusedError("no room", self.running)
        self.running.append(f"{source.name}@{generation}")
        await self.may_answer.wait()
        return tuple(self.running)

    async def stop(self, groups):
        await self.may_end.wait()
        for group in groups:
            self.running.remove(group)


class Loads:
    """A model of a repository, and its preparation over a supervisor."""

    def __init__(self, folder):
        write_repository(folder)
        self.model = ReadModel(load_model(folder / MODEL))
        self.supervisor = Supervisor()
        metrics, registry = Metrics(), ModelRegistry()
        self.engines = EngineClient(FrontendConfig(model_repository=str(folder)), metrics)
        groups = TokenGroups(self.supervisor, self.engines, GroupBoard())
        factory = ModelFactory(ModelCalls(registry, metrics.custom))
        self.loaded = ModelSet(factory, metrics, registry)
        self.preparation = ModelPreparation(
            self.loaded, groups, factory, BackgroundTasks(), lambda: None
        )

    async def begin(self):
        """A load whose group the supervisor has been asked to start, possibly without an
        answer yet."""
        loading = asyncio.ensure_future(self.preparation.prepare([self.model]))
        await until(lambda: self.supervisor.running)
        await asyncio.sleep(0.01)
        return loading

    def give_up(self):
        self.preparation.cancel([MODEL])


@pytest.fixture
def loads(tmp_path):
    """Nothing is loaded yet."""
    return Loads(tmp_path)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("num_unloads", [1, 2])
async def test_a_group_started_for_a_cancelled_load_is_ended(loads, num_unloads):
    loads.supervisor.may_end.set()
    loading = await loads.begin()

    for _ in range(num_unloads):
        loads.give_up()
        await asyncio.sleep(0.01)
    loads.supervisor.may_answer.set()

    await until(lambda: not loads.supervisor.running)
    candidates, failures = await loading
    assert candidates == []
    assert isinstance(failures[MODEL], LoadCancelledError)


async def test_a_load_waits_for_the_groups_of_a_cancelled_load_to_end(loads):
    supervisor = loads.supervisor
    supervisor.may_answer.set()
    loading = await loads.begin()
    loads.give_up()
    await loading

    again = await loads.begin()
    assert supervisor.running == [f"{MODEL}@1"]
    assert not again.done()
    supervisor.may_end.set()

    await until(lambda: supervisor.running not in ([], [f"{MODEL}@1"]))
    loads.give_up()
    await again
    await until(lambda: not supervisor.running)


async def test_groups_that_free_devices_end_even_if_the_load_is_cancelled(loads):
    supervisor = loads.supervisor
    supervisor.may_answer.set()
    loading = await loads.begin()
    engine = EngineHello(model=MODEL, group=f"{MODEL}@1", facts={})
    loads.engines.link_ready(Engine(), engine)
    candidates, _ = await loading
    assert loads.loaded.commit(candidates).failures == {}

    again = await loads.begin()
    assert loads.preparation.is_vacated(MODEL)
    loads.give_up()
    await again
    supervisor.may_end.set()

    await until(lambda: not supervisor.running)
    await until(lambda: not loads.preparation.leaving())
