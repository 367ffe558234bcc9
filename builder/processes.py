"""Tasks in several forked processes, which end with their parent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from trimaran.builder.stop_signals import STOP_SIGNALS
from trimaran.comm.errors import ConfigError, TrimaranError

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2

Task = TypeVar("Task")
Result = TypeVar("Result")
Say = Callable[[int], None]


class WorkerLostError(TrimaranError):
    """A process of the build ended before its task did."""


@dataclass(slots=True)
class _Worker:
    """A process, the way to it, and whether it has a task."""

    process: BaseProcess
    connection: Connection
    is_busy: bool = False


class ForkedWorkers(Generic[Task, Result]):
    """Processes that each call ``job(task, say)``; ``say`` adds to what `num_done` counts.

    They are forked, so ``job`` is theirs without being sent; tasks and results are sent. With
    one worker the job runs in this process; others call ``prepare`` before their first.
    """

    def __init__(
        self,
        job: Callable[[Task, Say], Result],
        num_workers: int,
        prepare: Callable[[], None],
    ) -> None:
        self._job = job
        self._prepare = prepare
        self._num_workers = num_workers
        # Without a lock: each worker counts in a place of its own, and a killed one holds none.
        self._counts = multiprocessing.get_context("fork").RawArray("q", max(num_workers, 1))

    @property
    def num_done(self) -> int:
        """What the jobs have said so far, in all."""
        return sum(self._counts)

    def run(self, tasks: Sequence[Task]) -> Generator[Result | None, None, None]:
        """The tasks' results as they come, and every now and then None.

        Raises whatever ends a task; the other processes are ended then, in mid-task.
        """
        if self._num_workers <= 1:
            say = self._counter(0)
            for task in tasks:
                yield self._job(task, say)
            return
        workers = [self._start(number) for number in range(min(self._num_workers, len(tasks)))]
        try:
            yield from self._share_out(list(tasks), workers)
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.join()
                worker.connection.close()

    def _share_out(
        self, tasks: list[Task], workers: Sequence[_Worker]
    ) -> Iterator[Result | None]:
        tasks.reverse()
        while True:
            for worker in workers:
                if tasks and not worker.is_busy:
                    worker.connection.send(tasks.pop())
                    worker.is_busy = True
            busy = {worker.connection: worker for worker in workers if worker.is_busy}
            if not busy:
                return
            for ready in wait(list(busy), _POLL_S):
                assert isinstance(ready, Connection)
                worker = busy[ready]
                yield self._result_of(worker)
                worker.is_busy = False
            yield None

    def _result_of(self, worker: _Worker) -> Result:
        try:
            result, error = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            raise WorkerLostError(_reason(worker.process.exitcode or 0)) from None
        if error is not None:
            raise error
        done: Result = result
        return done

    def _start(self, number: int) -> _Worker:
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        # Its own end of the pipe alone must stay open in the worker, so that its death shows.
        process = context.Process(
            target=self._serve, args=(number, there, here, os.getpid()), daemon=True
        )
        # A signal to the whole group must not find the parent's handlers in the worker.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        there.close()
        return _Worker(process, here)

    def _serve(self, number: int, there: Connection, here: Connection, parent: int) -> None:
        """What a worker does until its parent lets go of the connection."""
        here.close()
        for stop in STOP_SIGNALS:
            signal.signal(stop, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        self._prepare()
        say = self._counter(number)
        while True:
            try:
                there.send(self._outcome(there.recv(), say))
            except (EOFError, ConnectionError):
                return

    def _outcome(self, task: Task, say: Say) -> tuple[Any, Exception | None]:
        try:
            return self._job(task, say), None
        except (ConfigError, OSError) as error:
            return None, error
        except Exception:
            return None, RuntimeError(traceback.format_exc())

    def _counter(self, number: int) -> Say:
        def say(amount: int) -> None:
            self._counts[number] += amount

        return say


def _reason(exit_code: int) -> str:
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    if exit_code == -signal.SIGBUS:
        return (
            f"a process of the build was ended ({how}): a file of the checkpoint became "
            "shorter while it was read, or its disk failed. Run the same command again once it "
            "is whole: it goes on where it stopped."
        )
    return (
        f"a process of the build was ended ({how}), perhaps for lack of memory. Run the same "
        "command again, with fewer --workers: it goes on where it stopped."
    )
