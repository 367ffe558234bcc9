"""Long work on the event loop: other tasks run between its chunks; its result is the same."""

import asyncio
from itertools import pairwise

import pytest

from trimaran.server.inference import cooperative
from trimaran.server.inference.cooperative import run_at_once, run_cooperatively


@pytest.fixture(autouse=True)
def slice_of_one_chunk(monkeypatch):
    monkeypatch.setattr(cooperative, "SLICE_S", 0.0)


def work(log, name, count):
    for number in range(count):
        log.append(f"{name}{number}")
        yield
    return name


def fail():
    yield
    raise ValueError("it failed")


def test_short_cooperative_work_returns_its_result():
    log = []
    assert run_at_once(work(log, "a", 2)) == "a"
    assert log == ["a0", "a1"]


def test_other_tasks_run_between_the_chunks_of_long_work():
    log = []

    async def others():
        for _ in range(3):
            log.append("other")
            await asyncio.sleep(0)

    async def main():
        return (await asyncio.gather(run_cooperatively(work(log, "a", 3)), others()))[0]

    assert asyncio.run(main()) == "a"
    assert log == ["a0", "other", "a1", "other", "a2", "other"]


def test_one_long_job_runs_a_chunk_in_each_round():
    log, rounds = [], []

    async def count():
        while True:
            rounds.append(len(log))
            await asyncio.sleep(0)

    async def main():
        counting = asyncio.ensure_future(count())
        names = "abcdef"
        done = await asyncio.gather(*(run_cooperatively(work(log, name, 20)) for name in names))
        counting.cancel()
        assert done == list(names)

    asyncio.run(main())
    # Each begins at once, since most work is short.
    assert log[:6] == ["a0", "b0", "c0", "d0", "e0", "f0"]
    later = rounds[rounds.index(6) :]
    assert max(after - before for before, after in pairwise(later)) == 1
    assert log[6:] == [f"{name}{number}" for number in range(1, 20) for name in "abcdef"]


def test_huge_jobs_run_one_after_another_and_delay_no_small_job(monkeypatch):
    monkeypatch.setattr(cooperative, "LONG_SLICES", 9)
    log = []

    async def main():
        huge = [
            asyncio.ensure_future(run_cooperatively(work(log, name, 40))) for name in "abcd"
        ]
        while "a20" not in log:
            await asyncio.sleep(0)
        # Running jobs continue in rotation, including long but not huge jobs.
        assert await run_cooperatively(work(log, "e", 9)) == "e"
        assert not any(task.done() for task in huge)
        huge[3].cancel()
        await asyncio.gather(*huge, return_exceptions=True)

    asyncio.run(main())
    # One slice at once, nine slices in rotation, and the rest under the semaphore.
    assert log[:40] == [f"{name}{number}" for number in range(10) for name in "abcd"]
    places = {name: log.index(f"{name}10") for name in "abc"}
    assert places["a"] < places["b"] < log.index("a39") < places["c"]
    assert log.index("e8") < log.index("a39")
    assert "d10" not in log


def test_short_work_is_done_at_once(monkeypatch):
    monkeypatch.setattr(cooperative, "SLICE_S", 3600.0)
    log = []
    running = run_cooperatively(work(log, "a", 5))
    with pytest.raises(StopIteration) as end:
        running.send(None)
    assert end.value.value == "a"


def test_an_error_in_a_chunk_is_raised_to_the_awaiting_task():
    with pytest.raises(ValueError, match="it failed"):
        asyncio.run(run_cooperatively(fail()))


def test_work_of_a_cancelled_task_stops():
    log = []
    endless = work(log, "a", 1 << 60)

    async def main():
        task = asyncio.ensure_future(run_cooperatively(endless))
        other = asyncio.ensure_future(run_cooperatively(work(log, "b", 3)))
        while "b2" not in log:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await other

    assert asyncio.run(main()) == "b"
    assert list(endless) == []
