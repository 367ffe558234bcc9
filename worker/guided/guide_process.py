"""The process whose copies compile guides and fill masks. Copies can be ended at any time."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from trimaran.comm.errors import RequestError
from trimaran.worker.guided.library import Library
from trimaran.worker.guided.matcher import CompiledGuide, Matcher

NUM_SLOTS = 128
"""Most masks that one batch of questions requests."""

Question = tuple[int, int, list[int], list[int], int]
"""An output's number, its end id, its further ids, draft ids behind these, and the slot of the
first mask. The masks behind draft ids follow in the next slots."""

BEGUN = b"begun"
TOO_LARGE = "too large"
COMPLETE, OPEN, REJECTED = 1, 0, -1
"""The state after a question's ids; `REJECTED` less the index of an id that may not come."""

_PR_SET_PDEATHSIG = 1
_CACHE_BYTES = 1 << 25
_GROWTH_SHARE = 4
"""The outputs of a compiled guide may take a part of the guide's memory: one by this."""

_NICE, _SLOW_NICE = 5, 10
SLOW_S = 0.01
"""A mask that takes more processor time is slow: a request has limited time for such masks."""

_GIVE_WAY_S = 0.05
"""A process in which a mask takes more processor time has a lower priority from then on."""

_ANSWER_S = 0.005
"""Filled masks go to the rank at least so often while further masks are being filled."""

_IDS_A_LIMIT = 100
"""Ids of a question for each time limit: a replayed request has a question with many ids."""


def main() -> None:
    """Serve the rank at the other end of the socket whose descriptor is argument 1.

    For each requested copy the rank sends one end of a connection and the file of the masks.
    Argument 2 is the descriptor of a file with `Library.to_text`, argument 3 the bytes of
    memory for one guide, argument 4 the seconds of processor time for one mask.
    """
    # The rank ends this process by closing the socket; a signal to the whole job must not
    # interfere.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    os.nice(_NICE)
    # When memory runs out, the kernel kills a copy of this process first.
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    control = socket.socket(fileno=int(sys.argv[1]))
    # The library's imports make objects that stay: collections would take a fifth of the time.
    gc.disable()
    with open(int(sys.argv[2])) as file:
        library = Library.from_text(file.read(), _CACHE_BYTES)
    # The exit codes of copies are not collected.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # A garbage collection in a copy would copy the shared pages of memory.
    gc.freeze()
    gc.enable()
    pid = os.getpid()
    while descriptors := socket.recv_fds(control, 1, 2)[1]:
        # No thread runs here that a copy would lack.
        if os.fork() == 0:
            control.close()
            _die_with_parent()
            if os.getppid() == pid:
                _serve(library, Connection(descriptors[0]), descriptors[1])
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(library: Library, connection: Connection, file: int) -> None:
    """Answer the rank. Ends when the rank closes the connection, also during a compilation."""
    masks = np.frombuffer(mmap.mmap(file, 0), np.int32).reshape(NUM_SLOTS, -1)
    # The thread's stack does not count against the guide's memory limit.
    threading.Thread(target=_end_when_left, args=(connection,), daemon=True).start()
    server = _Copy(library, connection, masks, int(sys.argv[3]), float(sys.argv[4]))
    # A cancellation closes the rank's end, and this thread may be the first to notice. A
    # library that is out of memory raises MemoryError or RuntimeError.
    with suppress(EOFError, OSError, MemoryError, RuntimeError):
        while True:
            word, *task = connection.recv()
            if word == "compile":
                server.compile(*task)
            else:
                server.fill(*task)


def _end_when_left(connection: Connection) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


class _Copy:
    """The state of one process: its compiled guide and the outputs that follow the guide."""

    def __init__(
        self,
        library: Library,
        connection: Connection,
        masks: npt.NDArray[np.int32],
        max_bytes: int,
        step_timeout_s: float,
    ) -> None:
        self._library = library
        self._connection = connection
        self._masks = masks
        self._first_bytes = _memory_bytes()
        self._max_bytes = max_bytes
        self._step_timeout_s = step_timeout_s
        self._guide: CompiledGuide | None = None
        self._matchers: dict[int, Matcher] = {}
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def compile(self, kind: str, guide: str, seconds: float) -> None:
        """Say `BEGUN`, then bytes of memory, or why the guide cannot be compiled."""
        self._guide, self._matchers = None, {}
        _limit_memory(self._first_bytes + self._max_bytes)
        # This process must end even if the rank is stopped (SIGSTOP).
        signal.alarm(math.ceil(seconds) + 1)
        self._connection.send_bytes(BEGUN)
        answer = self._compiled(kind, guide)
        signal.alarm(0)
        num_bytes = _memory_bytes()
        growth = self._max_bytes // _GROWTH_SHARE
        _limit_memory(min(num_bytes + growth, self._first_bytes + self._max_bytes))
        self._connection.send_bytes((answer or str(num_bytes - self._first_bytes)).encode())

    def _compiled(self, kind: str, guide: str) -> str:
        """The reason why the guide cannot be compiled; empty after a successful compilation."""
        try:
            self._guide = self._library.compile(kind, guide)
        except RequestError as error:
            return str(error)
        except MemoryError:
            return TOO_LARGE
        return ""

    def fill(self, questions: list[Question], dropped: list[int]) -> None:
        """Answer each question by the mask after its ids, and by masks after its draft ids.

        An answer is int64 [n, 4]: the slot of the mask, the state after the ids, the
        microseconds of a slow mask (0 for a quick mask), and how many draft ids have a mask.
        """
        for number in dropped:
            self._matchers.pop(number, None)
        answers: list[tuple[int, int, int, int]] = []
        sent_at = time.monotonic()
        for index, (number, end_id, ids, drafts, slot) in enumerate(questions):
            began, cpu_began = time.monotonic(), time.process_time()
            status = self._answer(slot, number, end_id, ids)
            seconds = 0.0
            cpu_s = time.process_time() - cpu_began
            if cpu_s > SLOW_S:
                seconds = time.monotonic() - began
            if cpu_s > _GIVE_WAY_S:
                self._give_way()
            count = 0
            if drafts and status == OPEN and not seconds:
                count = self._fill_drafts(self._matchers[number], drafts, slot + 1)
            answers.append((slot, status, int(1e6 * seconds), count))
            if time.monotonic() - sent_at > _ANSWER_S or index + 1 == len(questions):
                self._connection.send_bytes(np.array(answers, np.int64).tobytes())
                answers, sent_at = [], time.monotonic()

    def _answer(self, slot: int, number: int, end_id: int, ids: list[int]) -> int:
        assert self._guide is not None, "masks are asked for without a guide"
        limit_s = self._step_timeout_s * max(1.0, len(ids) / _IDS_A_LIMIT)
        # The signal ends the process, whatever the library does.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        matcher = self._matchers.get(number)
        if matcher is None:
            matcher = self._matchers[number] = self._guide.start(end_id)
        status = OPEN
        for index, token_id in enumerate(ids):
            if not matcher.accept(token_id):
                status = REJECTED - index
                break
        else:
            status = COMPLETE if matcher.fill(self._masks, slot) else OPEN
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        return status

    def _fill_drafts(self, matcher: Matcher, drafts: list[int], slot: int) -> int:
        """Fill the masks after each of these ids, from ``slot`` on; the number of masks.

        The masks end before the first id that may not come, that ends the output, or whose
        mask is slow. The matcher's state is the same afterwards.
        """
        num_accepted = num_filled = 0
        for token_id in drafts:
            cpu_began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, self._step_timeout_s)
            if not matcher.begin_drafts(token_id):
                break
            num_accepted += 1
            if matcher.fill(self._masks, slot + num_filled):
                break
            num_filled += 1
            if time.process_time() - cpu_began > SLOW_S:
                break
        matcher.end_drafts(num_accepted)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        return num_filled

    def _give_way(self) -> None:
        missing = _SLOW_NICE - os.nice(0)
        if missing > 0:
            os.nice(missing)


def _memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _limit_memory(num_bytes: int) -> None:
    """Let this process have this much address space."""
    hard: Any = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        num_bytes = min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))
