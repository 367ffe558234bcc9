"""A group whose processes another process starts, like groups of the orchestrator."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace

from trimaran.comm.messages.messages import ChildState
from trimaran.launcher.starters.starter import RANK, GroupSpec
from trimaran.launcher.supervisor.group import Group, GroupEvents


class Spawned:
    """A starter without a process, whose ranks end by themselves."""

    pid, status, is_over, title = 0, None, True, "1 rank"

    def start(self, incarnation, events):
        pass

    def kill(self, *, spare_own=False):
        return False

    def release(self):
        pass


def rank_0():
    hello = SimpleNamespace(incarnation=0, world_size=1, rank=0, host="here")
    quiet = {name: lambda *_: None for name in ("send", "ping", "close")}
    return SimpleNamespace(hello=hello, rank=0, pid=1, num_unanswered=0, **quiet)


def serving_group(hang_timeout_s, **told):
    """A group that serves, and the connection of its rank; ``told`` are `GroupEvents`."""
    ignored = {name: lambda *_: None for name in GroupEvents.__annotations__}
    spec = GroupSpec(
        role=RANK, name="m", world_size=1, command=("rank",), env={},
        make_config=lambda incarnation, rank: {},
        connect_timeout_s=60, startup_timeout_s=60, hang_timeout_s=hang_timeout_s,
    )  # fmt: skip
    group, link = Group(spec, Spawned(), GroupEvents(**{**ignored, **told})), rank_0()
    group.start()
    group.on_hello(link)
    group.on_state(link, ChildState(state="ready"))
    return group, link


async def stop_twice():
    """Seconds until the end of a group that gets a second stop command while ending."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    group, link = serving_group(60, on_stopped=lambda _: ended.set())
    group.stop()
    group.on_lost(link)
    group.stop()
    started_s = loop.time()
    await asyncio.wait_for(ended.wait(), 60)
    return loop.time() - started_s


def test_a_second_stop_of_a_group_does_not_extend_its_deadline():
    assert asyncio.run(stop_twice()) < 3


def _timers():
    # Objects of torch warn on access to __class__; other tests may have imported torch.
    return [each for each in gc.get_objects() if issubclass(type(each), asyncio.TimerHandle)]


async def timers_after(num_pings):
    """Created and remaining timers after many pings of a group's rank."""
    # Objects of earlier tests in this process, held so that their addresses are not reused.
    before = _timers()
    asked = asyncio.Event()
    _, link = serving_group(hang_timeout_s=0.004)
    pings = iter(range(num_pings))
    link.ping = lambda: asked.set() if next(pings, None) is None else None
    await asyncio.wait_for(asked.wait(), 60)
    gc.collect()
    return len(_timers()) - len(before)


def test_expired_timers_of_a_group_are_removed():
    assert asyncio.run(timers_after(200)) < 20
