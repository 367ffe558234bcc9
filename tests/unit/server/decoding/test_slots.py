"""Slots for long work: short work overtakes, long work is overtaken for a bounded time only."""

from __future__ import annotations

import asyncio

import pytest

from trimaran.server.decoding.decoder import SizeOrderedSlots

MB = 1_000_000


class Work:
    """Works that hold a slot each, in the order in which they got them."""

    def __init__(self, num_slots: int) -> None:
        self.slots = SizeOrderedSlots(num_slots, long_bytes=100 * MB)
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, num_bytes: int) -> None:
        """Request a slot, and hold the slot until `end` is called."""
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, num_bytes))
        await asyncio.sleep(0)

    async def _run(self, name: str, num_bytes: int) -> None:
        async with self.slots.slot(num_bytes):
            self.begun.append(name)
            await self.ends[name].wait()

    async def end(self, name: str) -> None:
        """Give the slot back, and let the next work begin."""
        self.ends[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)

    async def end_all(self) -> list[str]:
        """End the works in the order in which they begin."""
        position = 0
        while position < len(self.tasks):
            await self.end(self.begun[position])
            position += 1
        return self.begun


async def test_work_starts_at_once_while_slots_are_free():
    work = Work(2)
    for name in ("a", "b", "c"):
        await work.start(name, MB)
    assert work.begun == ["a", "b"]
    await work.end("b")
    assert work.begun == ["a", "b", "c"]
    await work.end("a")
    await work.end("c")


async def test_short_work_overtakes_long_work_that_waits():
    work = Work(1)
    await work.start("first", MB)
    for name, megabytes in (("long", 60), ("middle", 30), ("short", 1)):
        await work.start(name, megabytes * MB)
    assert await work.end_all() == ["first", "short", "middle", "long"]


async def test_work_of_equal_size_runs_in_order_of_arrival():
    work = Work(1)
    names = [f"work {number}" for number in range(10)]
    for name in names:
        await work.start(name, MB)
    assert await work.end_all() == names


async def test_long_work_is_overtaken_only_by_work_that_arrives_soon_after():
    work = Work(1)
    await work.start("first", 1)
    # 2 MB come 0.2 s later than nothing does.
    await work.start("long", 2 * MB)
    await work.start("soon", 0)
    await asyncio.sleep(0.3)
    await work.start("late", 0)
    assert await work.end_all() == ["first", "soon", "long", "late"]


async def test_cancelled_work_leaves_the_queue():
    work = Work(1)
    await work.start("first", MB)
    await work.start("given up", MB)
    await work.start("last", MB)
    work.tasks["given up"].cancel()
    await work.end("first")
    assert work.begun == ["first", "last"]
    await work.end("last")


async def test_a_slot_given_to_work_that_is_cancelled_goes_to_the_next():
    work = Work(1)
    async with work.slots.slot(MB):
        await work.start("given up", MB)
        await work.start("last", MB)
    # The slot is given to the first waiting task, which has not run since.
    work.tasks["given up"].cancel()
    await asyncio.wait((work.tasks["given up"],))
    await asyncio.sleep(0)
    assert work.begun == ["last"]
    await work.end("last")
    await work.start("later", MB)
    assert work.begun == ["last", "later"]
    await work.end("later")


async def test_work_that_fails_gives_its_slot_back():
    slots = SizeOrderedSlots(1)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="failed"):
            async with slots.slot(MB):
                raise RuntimeError("failed")


async def test_of_long_work_one_runs_at_a_time_and_short_work_beside_it():
    work = Work(2)
    for name, megabytes in (("long", 200), ("second long", 200), ("short", 1), ("shorter", 0)):
        await work.start(name, megabytes * MB)
    assert work.begun == ["long", "short"]
    await work.end("short")
    assert work.begun == ["long", "short", "shorter"]
    await work.end("long")
    assert work.begun == ["long", "short", "shorter", "second long"]
    await work.end("shorter")
    await work.end("second long")


async def test_long_work_that_is_cancelled_lets_the_next_begin():
    work = Work(2)
    for name in ("first", "given up", "last"):
        await work.start(name, 200 * MB)
    work.tasks["given up"].cancel()
    await work.end("first")
    assert work.begun == ["first", "last"]
    await work.end("last")
    await work.start("later", 200 * MB)
    assert work.begun == ["first", "last", "later"]
    await work.end("later")
