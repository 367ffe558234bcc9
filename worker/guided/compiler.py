"""Compiles clients' guides to grammars beside the engine's steps, and caches grammars."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

from trimaran.comm.errors import RequestError
from trimaran.worker.config.engine_config import GuidedConfig
from trimaran.worker.guided.guide import Grammar
from trimaran.worker.guided.library import Library
from trimaran.worker.guided.trials import TooSlowError, Trials


class GrammarCache:
    """Caches grammars by type and text of their guides, least recently used first out."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._grammars: OrderedDict[tuple[str, str], Grammar] = OrderedDict()

    def get(self, guide: tuple[str, str]) -> Grammar | None:
        """The grammar of a guide; None if it is not cached."""
        if guide not in self._grammars:
            return None
        self._grammars.move_to_end(guide)
        return self._grammars[guide]

    def add(self, guide: tuple[str, str], grammar: Grammar) -> None:
        """Add a guide that is not cached, and drop others to stay within the size."""
        self._grammars[guide] = grammar
        self._num_bytes += _size(guide, grammar)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(*self._grammars.popitem(last=False))


def _size(guide: tuple[str, str], grammar: Grammar) -> int:
    return len(guide[1]) + grammar.num_bytes


_QUICK_S = 1.0
"""A guide that takes longer moves to the threads for slow guides, so that others do not
wait."""
_QUICK_THREADS = 2
_SLOW_THREADS = 1
_CACHE_BYTES = 1 << 29
"""Bytes of cached grammars; XGrammar caches as much again for parts of grammars."""
_LONGEST = 1 << 20
"""Most characters of a guide: a compiler's time and memory grow with its length."""


@dataclass(slots=True)
class _Job:
    """A guide, by type and text, that is being compiled, and the futures of its requests."""

    guide: tuple[str, str]
    futures: list[Future[Grammar]]

    def is_wanted(self) -> bool:
        return not all(future.cancelled() for future in self.futures)


class GuideCompiler:
    """Compiles guides in threads, and caches the grammars.

    A compilation ends only with its process, so each guide is first compiled in another
    process (`Trials`), within the time limit and while a request waits. Only a guide that
    compiled there is compiled in this process. Cancelling all of a guide's futures cancels
    its compilation.
    """

    def __init__(self, config: GuidedConfig, engine_dir: str, vocab_size: int) -> None:
        """Read the tokenizer's vocabulary.

        Raises:
            ConfigError: XGrammar cannot be imported, or the tokenizer cannot be read.
        """
        self._library = Library.load(config, engine_dir, vocab_size, _CACHE_BYTES)
        self._trials = Trials(self._library.to_text())
        self._timeout_s = config.timeout_s
        self._quick = ThreadPoolExecutor(_QUICK_THREADS, thread_name_prefix="guides")
        self._slow = ThreadPoolExecutor(_SLOW_THREADS, thread_name_prefix="slow-guides")
        self._lock = threading.Lock()
        """Guards the two fields below, which threads change when a job ends."""
        self._jobs: dict[tuple[str, str], _Job] = {}
        self._cache = GrammarCache(_CACHE_BYTES)

    def submit(self, kind: str, guide: str) -> Future[Grammar]:
        """Start to compile ``guide``; the future raises RequestError if that fails.

        Raises:
            RequestError: the guide has an unknown type, or is too long.
        """
        self._check(kind, guide)
        future: Future[Grammar] = Future()
        with self._lock:
            grammar = self._cache.get((kind, guide))
            if grammar is not None:
                future.set_result(grammar)
                return future
            job = self._jobs.get((kind, guide))
            if job is not None:
                job.futures.append(future)
                return future
            job = self._jobs[kind, guide] = _Job((kind, guide), [future])
            self._start(job)
        return future

    def _start(self, job: _Job) -> None:
        self._quick.submit(self._run, job, min(_QUICK_S, self._timeout_s))

    def _check(self, kind: str, guide: str) -> None:
        if kind not in self._library.kinds:
            raise RequestError(
                f"guided_decoding_guide_type is {kind!r} but must be one of "
                f"{', '.join(self._library.kinds)}"
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

    def _run(self, job: _Job, seconds: float) -> None:
        """Compile a guide within ``seconds``, or move it to the threads for slow guides."""
        try:
            self._trials.run(*job.guide, seconds, job.is_wanted)
            self._end(job, self._library.compile(*job.guide))
        except TooSlowError:
            if seconds < self._timeout_s:
                self._slow.submit(self._run, job, self._timeout_s)
            else:
                self._end(job, self._too_slow())
        except CancelledError:
            self._leave(job)
        except Exception as error:
            self._end(job, error)

    def _end(self, job: _Job, result: Grammar | Exception) -> None:
        with self._lock:
            del self._jobs[job.guide]
            if isinstance(result, Grammar):
                self._cache.add(job.guide, result)
        for future in job.futures:
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(result, Grammar):
                future.set_result(result)
            else:
                future.set_exception(result)

    def _leave(self, job: _Job) -> None:
        """Drop a job, or start it again if another request has asked for it meanwhile."""
        with self._lock:
            if job.is_wanted():
                self._start(job)
            else:
                del self._jobs[job.guide]

    def _too_slow(self) -> RequestError:
        return RequestError(
            f"guided_decoding_guide takes more than {self._timeout_s:g} s to be compiled. Make "
            "it smaller: fewer texts, fewer alternatives, or lower counts ({m,n}, maxLength, "
            "maxItems); or serve with a larger --guide-timeout."
        )

    def close(self) -> None:
        """End the threads and drop their results."""
        self._quick.shutdown(wait=False, cancel_futures=True)
        self._slow.shutdown(wait=False, cancel_futures=True)
        self._trials.close()
