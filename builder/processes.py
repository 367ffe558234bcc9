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
ReportProgress = Callable[[int], None]


class WorkerLostError(TrimaranError):
    """A process of the build ended during its task."""


@dataclass(slots=True)
class _Worker:
    """A process, the connection to it, and whether it has a task."""

    process: BaseProcess
    connection: Connection
    is_busy: bool = False


class ForkedWorkers(Generic[Task, Result]):
    """Processes that each call ``job(task, report)``; ``report`` adds to `num_done`.

    The processes are forked, so ``job`` need not be pickled; tasks and results are. With one
    worker the job runs in this process; other workers call ``prepare`` before their first task.
    """

    def __init__(
        self,
        job: Callable[[Task, ReportProgress], Result],
        num_workers: int,
        prepare: Callable[[], None],
    ) -> None:
        self._job = job
        self._prepare = prepare
        self._num_workers = num_workers
        # Without a lock: each worker has its own counter, and a killed worker holds no lock.
        self._counts = multiprocessing.get_context("fork").RawArray("q", max(num_workers, 1))

    @property
    def num_done(self) -> int:
        """The sum that the jobs have reported so far."""
        return sum(self._counts)

    def run(self, tasks: Sequence[Task]) -> Generator[Result | None, None, None]:
        """The results as they arrive, and None from time to time.

        Raises the exception of a task; the other processes are then killed during their tasks.
        """
        if self._num_workers <= 1:
            report = self._counter(0)
            for task in tasks:
                yield self._job(task, report)
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
        # Leave only its own end of the pipe open in the worker, so that its death is seen.
        process = context.Process(
            target=self._serve, args=(number, there, here, os.getpid()), daemon=True
        )
        # A signal to the whole group must not run the parent's handlers in the worker.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        there.close()
        return _Worker(process, here)

    def _serve(self, number: int, there: Connection, here: Connection, parent: int) -> None:
        """The loop of a worker, until its parent closes the connection."""
        here.close()
        for stop in STOP_SIGNALS:
            signal.signal(stop, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        self._prepare()
        report = self._counter(number)
        while True:
            try:
                there.send(self._outcome(there.recv(), report))
            except (EOFError, ConnectionError):
                return

    def _outcome(self, task: Task, report: ReportProgress) -> tuple[Any, Exception | None]:
        try:
            return self._job(task, report), None
        except (ConfigError, OSError) as error:
            return None, error
        except Exception:
            return None, RuntimeError(traceback.format_exc())

    def _counter(self, number: int) -> ReportProgress:
        def report(amount: int) -> None:
            self._counts[number] += amount

        return report


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
