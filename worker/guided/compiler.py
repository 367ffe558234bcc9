"""Compiles clients' guides beside the engine's steps, quick guides first."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence as List
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.worker.config.engine_config import GuidedConfig
from trimaran.worker.guided.guide import Grammar
from trimaran.worker.guided.library import Library
from trimaran.worker.guided.mask_process import MaskProcess, TooSlowError
from trimaran.worker.guided.process_pool import GuideKey, GuideProcesses

_SLICES_S = (0.1, 1.0, 4.0)
"""A guide that takes longer than its level's time is compiled anew at the next level. The last
level has the configured time."""

_THREADS = ((0, 1), (1, 0), (2, 3), (3, 2))
"""The levels that each thread serves, in order; slow guides have threads of their own."""

_FIRST_SLOW_LEVEL = 2
_MAX_SLOW = 16
"""Slow guides that may wait to be compiled."""

_CACHE_BYTES = 1 << 20
"""Rank 0 itself compiles nothing."""
_LONGEST = 1 << 20
"""Characters of a guide: a compiler's time and memory grow with it."""


@dataclass(slots=True)
class _Job:
    """A guide in compilation, and the requests that wait for the guide."""

    key: GuideKey
    futures: list[Future[Grammar]]
    level: int = 0

    def is_wanted(self) -> bool:
        return not all(future.cancelled() for future in self.futures)


class _Jobs:
    """Queues of guides by level. A guide starts at level 0, and a slow guide moves to the
    next level.
    """

    def __init__(self, num_levels: int) -> None:
        self._queues: list[deque[_Job]] = [deque() for _ in range(num_levels)]
        self._changed = threading.Condition()
        self._is_closed = False

    def add(self, job: _Job) -> bool:
        """Queue a job at its level; False if too many slow jobs wait."""
        with self._changed:
            queue = self._queues[job.level]
            if job.level >= _FIRST_SLOW_LEVEL:
                # Cancelled jobs do not count towards the limit.
                left = [each for each in queue if each.is_wanted()]
                if len(left) >= _MAX_SLOW:
                    return False
            queue.append(job)
            self._changed.notify_all()
            return True

    def take(self, levels: List[int]) -> _Job | None:
        """The next job of the first of these levels that has one; None at the end."""
        with self._changed:
            while not self._is_closed:
                for level in levels:
                    if self._queues[level]:
                        return self._queues[level].popleft()
                self._changed.wait()
        return None

    def close(self) -> None:
        """Let all threads end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class GuideCompiler:
    """Has guides compiled in separate processes, which then fill the masks of their guides.

    A guide is first tried for a tenth of a second, so that each of many slow guides delays a
    quick guide by this time at most. A slow guide starts again at the next level. Cancelling
    its future cancels a waiting guide, and ends the process of a guide in compilation.
    """

    def __init__(
        self,
        config: GuidedConfig,
        engine_dir: str,
        vocab_size: int,
        *,
        slices_s: List[float] = _SLICES_S,
    ) -> None:
        """Read the tokenizer's vocabulary.

        ``slices_s`` are the seconds of each level but the last, at most three.

        Raises:
            ConfigError: XGrammar cannot be imported, or the tokenizer cannot be read.
        """
        library = Library.load(config, engine_dir, vocab_size, _CACHE_BYTES)
        self._kinds = tuple(library.kinds)
        self._processes = GuideProcesses(
            library.to_text(),
            library.vocab_size,
            step_timeout_s=config.step_timeout_s,
            max_processes=config.max_processes,
        )
        self._timeout_s = config.timeout_s
        self._step_timeout_s = config.step_timeout_s
        self._slices_s = [each for each in slices_s if each < self._timeout_s]
        self._slices_s.append(self._timeout_s)
        self._jobs = _Jobs(len(slices_s) + 1)
        self._lock = threading.Lock()
        """Guards the field below: jobs end in the threads."""
        self._open_jobs: dict[GuideKey, _Job] = {}
        for levels in _THREADS:
            threading.Thread(
                target=self._run_all, args=(levels,), name=f"guides-{levels[0]}", daemon=True
            ).start()

    def submit(self, kind: str, guide: str) -> Future[Grammar]:
        """Start to compile ``guide``; the future raises RequestError if the compilation fails.

        The receiver of the future's grammar must start or release the grammar.

        Raises:
            RequestError: no guide has this type, or the guide is too long to be tried.
        """
        self._check(kind, guide)
        future: Future[Grammar] = Future()
        key = kind, guide
        with self._lock:
            process = self._processes.find(key)
            if process is not None:
                future.set_result(Grammar(process, self._step_timeout_s))
                return future
            job = self._open_jobs.get(key)
            if job is not None:
                job.futures.append(future)
                return future
            job = self._open_jobs[key] = _Job(key, [future])
            self._jobs.add(job)
        return future

    def _check(self, kind: str, guide: str) -> None:
        if kind not in self._kinds:
            raise RequestError(
                f"guided_decoding_guide_type is {kind!r} but must be one of "
                f"{', '.join(self._kinds)}"
            )
        if kind != "json" and not guide:
            raise RequestError(
                f"guided_decoding_guide_type is {kind!r} but guided_decoding_guide is empty"
            )
        if len(guide) > _LONGEST:
            raise RequestError(
                f"guided_decoding_guide has {len(guide)} characters but may have at most "
                f"{_LONGEST}. Shorten it."
            )

    def _run_all(self, levels: List[int]) -> None:
        while (job := self._jobs.take(levels)) is not None:
            self._run(job)

    def _run(self, job: _Job) -> None:
        """Compile a guide within the time of its level, or queue the guide at the next
        level.
        """
        seconds = self._slices_s[job.level]
        try:
            process = self._processes.compile(*job.key, seconds, job.is_wanted)
        except TooSlowError:
            if job.level + 1 == len(self._slices_s):
                self._fail(job, self._too_slow())
                return
            job.level += 1
            if not self._jobs.add(job):
                self._fail(job, _too_many())
        except CancelledError:
            self._leave(job)
        except Exception as error:
            self._fail(job, error)
        else:
            self._end(job, process)

    def _end(self, job: _Job, process: MaskProcess) -> None:
        """Lend the process to all requests that still wait."""
        with self._lock:
            del self._open_jobs[job.key]
            # A running future can no longer be cancelled.
            waiting = [each for each in job.futures if each.set_running_or_notify_cancel()]
            if waiting:
                self._processes.keep(job.key, process, len(waiting))
        if not waiting:
            self._processes.close_one(process)
        for future in waiting:
            future.set_result(Grammar(process, self._step_timeout_s))

    def _fail(self, job: _Job, error: Exception) -> None:
        with self._lock:
            del self._open_jobs[job.key]
        for future in job.futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _leave(self, job: _Job) -> None:
        """Remove a job, unless another request with the same guide has arrived since."""
        with self._lock:
            if job.is_wanted():
                self._jobs.add(job)
            else:
                del self._open_jobs[job.key]

    def _too_slow(self) -> RequestError:
        return RequestError(
            f"guided_decoding_guide takes more than {self._timeout_s:g} s to be compiled. Make "
            "it smaller: fewer texts, fewer alternatives, or lower counts ({m,n}, maxLength, "
            "maxItems); or serve with a larger --guide-timeout."
        )

    def close(self) -> None:
        """End the threads and the processes; unfinished work is dropped."""
        self._jobs.close()
        self._processes.close()


def _too_many() -> RequestError:
    return RequestError(
        f"{_MAX_SLOW} guides that take long to be compiled wait already, so that this one is "
        "refused. Make guided_decoding_guide smaller, or send the request again later.",
        ErrorKind.UNAVAILABLE,
    )
