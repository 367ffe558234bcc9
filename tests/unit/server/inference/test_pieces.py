"""Long work on the event loop: others run between its pieces, and what it does is the same."""

import asyncio
from itertools import pairwise

import pytest

from trimaran.server.inference import pieces
from trimaran.server.inference.pieces import finish, spread


@pytest.fixture(autouse=True)
def slice_of_one_piece(monkeypatch):
    monkeypatch.setattr(pieces, "SLICE_S", 0.0)


def work(log, name, count):
    for number in range(count):
        log.append(f"{name}{number}")
        yield
    return name


def fail():
    yield
    raise ValueError("it failed")


def test_work_at_once_gives_its_result():
    log = []
    assert finish(work(log, "a", 2)) == "a"
    assert log == ["a0", "a1"]


def test_others_run_between_the_pieces_of_long_work():
    log = []

    async def others():
        for _ in range(3):
            log.append("other")
            await asyncio.sleep(0)

    async def main():
        return (await asyncio.gather(spread(work(log, "a", 3)), others()))[0]

    assert asyncio.run(main()) == "a"
    assert log == ["a0", "other", "a1", "other", "a2", "other"]


def test_of_all_long_work_one_has_a_piece_in_a_round():
    log, rounds = [], []

    async def count():
        while True:
            rounds.append(len(log))
            await asyncio.sleep(0)

    async def main():
        counting = asyncio.ensure_future(count())
        names = "abcdef"
        done = await asyncio.gather(*(spread(work(log, name, 20)) for name in names))
        counting.cancel()
        assert done == list(names)

    asyncio.run(main())
    # Each begins at once, since most work is short.
    assert log[:6] == ["a0", "b0", "c0", "d0", "e0", "f0"]
    later = rounds[rounds.index(6) :]
    assert max(after - before for before, after in pairwise(later)) == 1
    assert log[6:] == [f"{name}{number}" for number in range(1, 20) for name in "abcdef"]


def test_huge_work_waits_while_others_are_huge_and_keeps_no_other_waiting(monkeypatch):
    monkeypatch.setattr(pieces, "LONG_SLICES", 9)
    log = []

    async def main():
        huge = [asyncio.ensure_future(spread(work(log, name, 40))) for name in "abcd"]
        while "a20" not in log:
            await asyncio.sleep(0)
        # What others have begun goes on in turns, and what is only long does too.
        assert await spread(work(log, "e", 9)) == "e"
        assert not any(task.done() for task in huge)
        huge[3].cancel()
        await asyncio.gather(*huge, return_exceptions=True)

    asyncio.run(main())
    # A slice at once, nine in turn, and the next with a place.
    assert log[:40] == [f"{name}{number}" for number in range(10) for name in "abcd"]
    places = {name: log.index(f"{name}10") for name in "abc"}
    assert places["a"] < places["b"] < log.index("a39") < places["c"]
    assert log.index("e8") < log.index("a39")
    assert "d10" not in log


def test_short_work_is_done_at_once(monkeypatch):
    monkeypatch.setattr(pieces, "SLICE_S", 3600.0)
    log = []
    running = spread(work(log, "a", 5))
    with pytest.raises(StopIteration) as end:
        running.send(None)
    assert end.value.value == "a"


def test_what_fails_in_a_piece_comes_to_who_waits():
    with pytest.raises(ValueError, match="it failed"):
        asyncio.run(spread(fail()))


def test_nothing_goes_on_for_who_waits_no_more():
    log = []
    endless = work(log, "a", 1 << 60)

    async def main():
        task = asyncio.ensure_future(spread(endless))
        other = asyncio.ensure_future(spread(work(log, "b", 3)))
        while "b2" not in log:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await other

    assert asyncio.run(main()) == "b"
    assert list(endless) == []
