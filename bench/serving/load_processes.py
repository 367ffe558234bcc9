"""A load from several processes at once, where one could not read answers fast enough."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from trimaran.bench.serving.load import LoadGenerator, Record, Run, Target, at_first_interrupt
from trimaran.bench.serving.workload import Item
from trimaran.comm.errors import ConfigError, TrimaranError

Plan = Sequence[tuple[Item, float]]
MakeTarget = Callable[[], Awaitable[Target]]
"""Connects; it is sent to the processes, so it has to be picklable."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What one process sends, and how many requests at once."""

    warmup: Sequence[Item]
    plan: Plan
    concurrency: int


_START_S = 0.1
"""From the last process's word that it is ready to the moment that delays count from."""


class LoadProcessLostError(TrimaranError):
    """A process of the load ended before its requests were answered."""


def run_in_processes(
    make_target: MakeTarget,
    warmup: Sequence[Item],
    plan: Plan,
    concurrency: int,
    num_processes: int,
) -> Run:
    """Deal the plan out by the share that each has of the concurrency; the run of all.

    It begins once all processes have connected and the warm-up, dealt out too, is answered.
    Times of all processes are on one clock, the host's monotonic one. A Ctrl-C once it has
    begun stops it.

    Raises:
        ConfigError: a process cannot connect.
        LoadProcessLostError: one was ended.
    """
    with ExitStack() as stack:
        processes = []
        for index in range(num_processes):
            slots = range(index, concurrency, num_processes)
            own = [each for j, each in enumerate(plan) if j % concurrency in slots]
            share = _Share(warmup[index::num_processes], own, len(slots))
            processes.append(stack.enter_context(_Process(make_target, share)))
        for process in processes:
            process.receive()
        begin = time.monotonic() + _START_S
        for process in processes:
            process.send(begin)

        def stop() -> None:
            for process in processes:
                process.stop()

        with at_first_interrupt(stop):
            records = [record for process in processes for record in process.receive()]
    records.sort(key=lambda record: record.due_s)
    return Run.of(records, begin, len(plan))


class _Process:
    """Sends a share of the load; it says that it is ready, gets the begin, and says what came.

    Any word after the begin stops it. Use as a context manager, which ends it.
    """

    def __init__(self, make_target: MakeTarget, share: _Share) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, self._there = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(self._there, make_target, share), daemon=True
        )

    def __enter__(self) -> _Process:
        # Ctrl-C goes to all: who started the processes ends them, without their tracebacks. The
        # first start of the tracker would let the signal through again.
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        # Its own end alone must stay open, so that its death shows.
        self._there.close()
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def send(self, begin: float) -> None:
        """Let it begin then."""
        try:
            self._connection.send(begin)
        except ConnectionError:
            raise self._lost() from None

    def stop(self) -> None:
        """Let it send no more, and say what came."""
        # One that is lost, or has just ended, is told by `receive`.
        with suppress(OSError):
            self._connection.send(None)

    def receive(self) -> Any:
        """What it says next."""
        try:
            said = self._connection.recv()
        except (EOFError, ConnectionError):
            raise self._lost() from None
        if isinstance(said, ConfigError):
            raise said
        return said

    def _lost(self) -> LoadProcessLostError:
        self._process.join()
        return LoadProcessLostError(
            f"a process of the load ended with exit code {self._process.exitcode}, perhaps for "
            "lack of memory. Run it again, with fewer --load-processes."
        )


def _serve(connection: Connection, make_target: MakeTarget, share: _Share) -> None:
    """What a process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _end_with_parent()
    said: list[Record] | ConfigError
    try:
        said = uvloop.run(_send(connection, make_target, share))
    except ConfigError as error:
        said = error
    # uvloop leaves what it watched non-blocking, which takes no long list of records.
    os.set_blocking(connection.fileno(), True)
    # The parent process may be gone; the connection then ends, which stopped the load.
    with suppress(ConnectionError):
        connection.send(said)


def _end_with_parent() -> None:
    """Send no more once the parent process is gone, by a signal for example."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


async def _send(connection: Connection, make_target: MakeTarget, share: _Share) -> list[Record]:
    loop = asyncio.get_running_loop()
    target = await make_target()
    try:
        load = LoadGenerator(target, share.concurrency)
        await load.warm_up(share.warmup, len(share.plan))
        connection.send(None)
        begin: float = connection.recv()

        def stop() -> None:
            loop.remove_reader(connection.fileno())
            load.stop()

        loop.add_reader(connection.fileno(), stop)
        return (await load.run(share.plan, begin=begin)).records
    finally:
        await target.close()
