"""A load from several processes at once, where one could not read answers fast enough."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence

import uvloop

from trimaran.client.load import LoadGenerator, Record, Run, Target
from trimaran.client.workload import Item

Plan = Sequence[tuple[Item, float]]
MakeTarget = Callable[[], Awaitable[Target]]
"""Connects; it is sent to the processes, so it has to be picklable."""

_START_S = 2.0
"""Time for every process to import and connect, before the first request is due."""


def run_in_processes(
    make_target: MakeTarget, plan: Plan, concurrency: int, num_processes: int
) -> Run:
    """Deal the plan out by the share that each has of the concurrency; the run of all.

    Times of all processes are on one clock, the host's monotonic one.
    """
    begin = time.monotonic() + _START_S
    shares = []
    for index in range(num_processes):
        slots = range(index, concurrency, num_processes)
        own = [each for j, each in enumerate(plan) if j % concurrency in slots]
        shares.append((make_target, own, len(slots), begin))
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_processes, initializer=_end_with_parent) as pool:
        found = pool.starmap(_run_share, shares, chunksize=1)
    records = [record for part in found for record in part]
    records.sort(key=lambda record: record.due_s)
    end = max((record.end_s for record in records), default=begin)
    return Run(records, end - begin)


def _end_with_parent() -> None:
    """Send no more once whoever wants the answers is gone, by a signal for example."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _run_share(
    make_target: MakeTarget, plan: Plan, concurrency: int, begin: float
) -> list[Record]:
    return uvloop.run(_send(make_target, plan, concurrency, begin))


async def _send(
    make_target: MakeTarget, plan: Plan, concurrency: int, begin: float
) -> list[Record]:
    target = await make_target()
    try:
        done = await LoadGenerator(target, concurrency).run(plan, begin=begin)
    finally:
        await target.close()
    return done.records
