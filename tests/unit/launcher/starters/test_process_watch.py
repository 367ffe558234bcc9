"""Ranks without a starter that reports their death, as real processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from trimaran.launcher.starters.process_watch import RankWatch

TAG = "watched"
SLEEP = "import time; print(flush=True); time.sleep(99)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
PATIENCE_S = 30


def start(program: str, incarnation: int = 2) -> subprocess.Popen[bytes]:
    """A process of the group that has started."""
    tags = {"TRIMARAN_GROUP": TAG, "TRIMARAN_INCARNATION": str(incarnation)}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **tags},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


async def kill_and_hear(ranks: list[subprocess.Popen[bytes]], late_s: float) -> str:
    """The watch's reports on the death of the last rank, killed ``late_s`` after its start."""
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    watch = RankWatch(TAG, 2, len(ranks), lambda text: told.done() or told.set_result(text))
    await asyncio.sleep(late_s)
    assert not told.done()
    ranks[-1].kill()
    ranks[-1].wait()
    try:
        return await asyncio.wait_for(told, PATIENCE_S)
    finally:
        watch.close()


@pytest.mark.parametrize("late_s", [0.3, 1.0], ids=["while looking", "when all are known"])
def test_the_death_of_a_rank_is_noticed(late_s):
    ranks = [start(SLEEP), start(SLEEP)]
    try:
        text = asyncio.run(kill_and_hear(ranks, late_s))
        assert f"(pid {ranks[-1].pid}) died" in text
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()


def test_the_end_of_a_program_started_by_a_rank_is_no_death():
    async def watch() -> list[str]:
        told: list[str] = []
        watch = RankWatch(TAG, 2, 1, told.append)
        await asyncio.sleep(1.0)
        helper = int(subprocess.check_output(["pgrep", "-P", str(rank.pid)]))
        os.kill(helper, 9)
        await asyncio.sleep(0.5)
        watch.close()
        return told

    rank = start(PARENT + "\nimport time; time.sleep(99)")
    try:
        assert asyncio.run(watch()) == []
    finally:
        rank.kill()
        rank.wait()
        rank.stdout.close()


def test_a_late_rank_of_an_earlier_incarnation_is_killed_without_a_reported_death():
    async def watch() -> list[str]:
        told: list[str] = []
        watch = RankWatch(TAG, 2, 1, told.append)
        await asyncio.to_thread(late.wait, PATIENCE_S)
        await asyncio.sleep(0.8)
        watch.close()
        return told

    rank, late = start(SLEEP), start(SLEEP, incarnation=1)
    try:
        assert asyncio.run(watch()) == []
        assert late.returncode == -9
    finally:
        for process in (rank, late):
            process.kill()
            process.wait()
            process.stdout.close()
