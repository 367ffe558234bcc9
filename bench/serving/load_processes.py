"""A load from several processes at once, for rates that one process cannot read."""

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
"""Creates a connected target; sent to the processes, so it has to be picklable."""


@dataclass(frozen=True, slots=True)
class _Share:
    """The share of one process, and its number of concurrent requests."""

    warmup: Sequence[Item]
    plan: Plan
    concurrency: int


_START_S = 0.1
"""From the last process's ready message to the moment that delays count from."""


class LoadProcessLostError(TrimaranError):
    """A process of the load ended before its requests were answered."""


def run_in_processes(
    make_target: MakeTarget,
    warmup: Sequence[Item],
    plan: Plan,
    concurrency: int,
    num_processes: int,
) -> Run:
    """Divide the plan in proportion to the concurrency of each process; returns the merged run.

    The run begins once all processes have connected and the warm-up, divided too, is answered.
    Times of all processes are on one clock, the host's monotonic one. A Ctrl-C after the begin
    stops the run.

    Raises:
        ConfigError: a process cannot connect.
        LoadProcessLostError: a process was killed.
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
    """Sends a share of the load: reports that it is ready, receives the begin, and returns
    records.

    Any message after the begin stops the load. Use as a context manager, which ends the
    process.
    """

    def __init__(self, make_target: MakeTarget, share: _Share) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, self._there = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(self._there, make_target, share), daemon=True
        )

    def __enter__(self) -> _Process:
        # Ctrl-C reaches all processes: the parent ends the load processes, without their
        # tracebacks. The resource tracker's first start would unblock the signal again.
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        # Only the process's own end may stay open, so that its death is noticed.
        self._there.close()
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def send(self, begin: float) -> None:
        """Start the load at this time."""
        try:
            self._connection.send(begin)
        except ConnectionError:
            raise self._lost() from None

    def stop(self) -> None:
        """Stop the load, and request its records."""
        # `receive` reports a lost process.
        with suppress(OSError):
            self._connection.send(None)

    def receive(self) -> Any:
        """The next message of the process."""
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
    """The main function of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _end_with_parent()
    said: list[Record] | ConfigError
    try:
        said = uvloop.run(_send(connection, make_target, share))
    except ConfigError as error:
        said = error
    # uvloop leaves the socket non-blocking, which cannot take long messages.
    os.set_blocking(connection.fileno(), True)
    # The parent process may be gone; the connection then closed, which stopped the load.
    with suppress(ConnectionError):
        connection.send(said)


def _end_with_parent() -> None:
    """Stop the load when the parent process is gone, for example killed."""
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
