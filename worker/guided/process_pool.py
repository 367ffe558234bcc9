"""The processes that compile guides and fill masks: started, lent by guide, ended."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError
from multiprocessing.connection import Connection

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.worker.guided.guide_process import NUM_SLOTS
from trimaran.worker.guided.mask_process import MaskProcess, ProcessEndedError

GuideKey = tuple[str, str]
"""Type and text of a guide."""

_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from trimaran.worker.guided.guide_process import main; main()"
)
_POLL_S = 0.05
"""Seconds between checks that a request still wants a process."""
_LATER_S = 0.2
"""Time within which the copies of a killed process end."""
_ATTEMPTS = 3
_MAX_BYTES, _BYTES, _BYTES_AN_ID = 2 << 30, 96 << 20, 15 << 10
"""Memory of a guide: at most, and in proportion to the vocabulary, whose masks XGrammar keeps:
1.9 GiB for 128,256 ids."""
_MAX_IDLE = 16
"""Processes that keep a compiled guide which no request uses."""
_MAX_IDLE_S = 300.0
"""Such a process ends after so long: it takes some 5 MB beside its guide."""
# The process forks, and must have a single thread for this. Heaps of further threads would also
# count towards a guide's memory limit, with 64 MiB of address space each.
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX"), "1"
)


class GuideProcesses:
    """Lends processes. Each process serves one guide at a time, for all requests with this
    guide.

    A guide that is slow or crashes its process therefore disturbs no other guide. Only the end
    of its process stops a running compiler or matcher of the library. All processes are copies
    of a parent process that has loaded the library and the tokenizer. A process whose guide no
    request uses any more keeps the compiled guide until the process is wanted for another
    guide, or for five minutes.
    """

    def __init__(
        self,
        library_text: str,
        vocab_size: int,
        *,
        step_timeout_s: float = 1.0,
        max_processes: int = 64,
        max_bytes: int = 0,
    ) -> None:
        """Start the first process in the background, which takes some seconds.

        ``library_text`` is `Library.to_text`; a guide may take ``max_bytes`` of memory, or by
        default what suits the vocabulary.
        """
        self._library_text = library_text
        self._mask_bytes = 4 * -(-vocab_size // 32)
        self._step_timeout_s = step_timeout_s
        self._max_processes = max_processes
        self._max_bytes = max_bytes or min(_BYTES + _BYTES_AN_ID * vocab_size, _MAX_BYTES)
        self._changed = threading.Condition()
        """Guards all fields below: guides are compiled in threads."""
        self._is_closed = False
        self._num_lent = 0
        """Processes that compile, or serve a guide that requests use."""
        self._in_use: dict[GuideKey, MaskProcess] = {}
        self._users: dict[MaskProcess, tuple[GuideKey, int]] = {}
        self._idle: OrderedDict[GuideKey, MaskProcess] = OrderedDict()
        """Processes by compiled guide, the most recently used last."""
        self._blank: list[MaskProcess] = []
        """Idle too, without a guide."""
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        file = os.memfd_create("guides")
        with theirs, open(file, "w+b") as text:
            text.write(self._library_text.encode())
            text.seek(0)
            # The kernel ends the process together with the current thread. The current thread
            # must therefore be the main thread or a thread of a permanent pool.
            arguments = (theirs.fileno(), file, self._max_bytes, self._step_timeout_s)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD, "CUDA_VISIBLE_DEVICES": ""},
                pass_fds=(theirs.fileno(), file),
            )

    # ---- compile -------------------------------------------------------------------------

    def compile(
        self, kind: str, guide: str, seconds: float, is_wanted: Callable[[], bool]
    ) -> MaskProcess:
        """A process that has compiled ``guide`` within a time limit. The caller must `keep` or
        `close` the process.

        Raises:
            RequestError: the guide cannot be compiled.
            TooSlowError: it takes longer.
            CancelledError: it is not wanted any more.
        """
        for _ in range(_ATTEMPTS):
            try:
                process, origin = self._take(is_wanted)
            except OSError:
                continue
            try:
                process.compile(kind, guide, seconds, is_wanted)
            except ProcessEndedError as error:
                self.close_one(process)
                if error.has_begun and _is_alive(origin):
                    raise self._too_large() from None
            except RequestError:
                self._give_back_blank(process)
                raise
            except BaseException:
                # The closed process ends.
                self.close_one(process)
                raise
            else:
                return process
        raise RequestError("the processes that compile guides ended", ErrorKind.UNAVAILABLE)

    def _too_large(self) -> RequestError:
        return RequestError(
            "guided_decoding_guide ends its compiler, or takes more than "
            f"{self._max_bytes >> 20} MiB of memory to be compiled. Make it smaller: fewer "
            "texts, fewer alternatives, or lower counts ({m,n}, maxLength, maxItems)."
        )

    def _take(
        self, is_wanted: Callable[[], bool]
    ) -> tuple[MaskProcess, subprocess.Popen[bytes]]:
        """An idle process, and the process from which it was forked.

        Raises:
            CancelledError: the guide's requests were cancelled.
            OSError: no process is idle, and no process can be started.
        """
        with self._changed:
            while True:
                if not is_wanted() or self._is_closed:
                    raise CancelledError
                if self._num_lent < self._max_processes:
                    break
                self._changed.wait(_POLL_S)
            if self._process.poll() is not None:
                self._restart()
            self._trim()
            num_idle = len(self._blank) + len(self._idle)
            is_full = self._num_lent + num_idle >= self._max_processes
            if self._blank:
                process = self._blank.pop()
            elif self._idle and (is_full or num_idle >= _MAX_IDLE):
                process = self._idle.popitem(last=False)[1]
            else:
                process = self._new()
            self._num_lent += 1
            return process, self._process

    def _restart(self) -> None:
        self._control.close()
        # Copies of a process end with their parent.
        for process in (*self._blank, *self._idle.values()):
            process.close()
        self._blank.clear()
        self._idle.clear()
        self._start()

    def _new(self) -> MaskProcess:
        ours, theirs = socket.socketpair()
        file = os.memfd_create("masks")
        try:
            with ours, theirs:
                os.ftruncate(file, NUM_SLOTS * self._mask_bytes)
                masks = mmap.mmap(file, 0)
                try:
                    socket.send_fds(self._control, [b"t"], [theirs.fileno(), file])
                except OSError:
                    # The parent is about to end, and the next parent replaces it.
                    self._process.wait()
                    raise
                connection = Connection(ours.detach())
        finally:
            os.close(file)
        return MaskProcess(connection, masks, self._step_timeout_s, self)

    # ---- lend ----------------------------------------------------------------------------

    @property
    def is_exhausted(self) -> bool:
        """Whether as many processes are lent as may be."""
        return self._num_lent >= self._max_processes

    def keep(self, key: GuideKey, process: MaskProcess, num_users: int) -> None:
        """Lend a process to ``num_users`` requests with its compiled guide."""
        with self._changed:
            self._in_use[key] = process
            self._users[process] = key, num_users

    def find(self, key: GuideKey) -> MaskProcess | None:
        """Lend the process that has compiled a guide to another request; None without one."""
        with self._changed:
            process = self._in_use.get(key)
            if process is not None and not process.has_ended:
                self._users[process] = key, self._users[process][1] + 1
                return process
            process = self._idle.pop(key, None)
            if process is None:
                return None
            if not process.is_well:
                process.close()
                return None
            self._num_lent += 1
            self._in_use[key] = process
            self._users[process] = key, 1
            return process

    def release(self, process: MaskProcess) -> None:
        """A request returns a process that was lent to it."""
        with self._changed:
            key, num_users = self._users[process]
            if num_users > 1:
                self._users[process] = key, num_users - 1
                return
            del self._users[process]
            if self._in_use.get(key) is process:
                del self._in_use[key]
            self._num_lent -= 1
            if self._is_closed or not process.is_well:
                process.close()
            else:
                process.idle_since = time.monotonic()
                self._idle[key] = process
            self._trim()
            self._changed.notify()

    def _trim(self) -> None:
        """End idle processes beyond the limits, the least recently used first."""
        processes = (*self._users, *self._idle.values())
        num_bytes = sum(process.num_bytes for process in processes)
        expired = time.monotonic() - _MAX_IDLE_S
        while self._idle:
            key, process = next(iter(self._idle.items()))
            is_over = num_bytes > self._max_bytes or len(self._idle) > _MAX_IDLE
            if not is_over and process.idle_since > expired:
                return
            del self._idle[key]
            num_bytes -= process.num_bytes
            process.close()

    def _give_back_blank(self, process: MaskProcess) -> None:
        with self._changed:
            self._num_lent -= 1
            if self._is_closed or len(self._blank) + len(self._idle) >= _MAX_IDLE:
                process.close()
            else:
                self._blank.append(process)
            self._changed.notify()

    def close_one(self, process: MaskProcess) -> None:
        """End a process that `compile` returned."""
        process.close()
        with self._changed:
            self._num_lent -= 1
            self._changed.notify()

    def close(self) -> None:
        """End all processes, and with them all that is compiled or filled."""
        with self._changed:
            self._is_closed = True
            self._process.kill()
            self._process.wait()
            self._control.close()
            for process in (*self._blank, *self._idle.values()):
                process.close()
            self._blank.clear()
            self._idle.clear()


def _is_alive(process: subprocess.Popen[bytes]) -> bool:
    """Whether the parent of an ended copy is alive. A new parent may have replaced it."""
    try:
        process.wait(_LATER_S)
    except subprocess.TimeoutExpired:
        return True
    return False
