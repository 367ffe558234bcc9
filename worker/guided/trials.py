"""Trial compilations of guides in child processes, which can be killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from multiprocessing.connection import Connection

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.worker.guided.trial_process import BEGUN, TOO_LARGE

_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from trimaran.worker.guided.trial_process import main; main()"
)
_LOOK_S = 0.05
"""Seconds between checks that a request still wants the trial."""
_LATER_S = 0.2
"""Seconds in which a killed process is seen to have ended; its children end earlier."""
_ATTEMPTS = 3
_MAX_BYTES = 2 << 30
# The process forks children, for which it must have a single thread.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class TooSlowError(Exception):
    """The compilation of a guide exceeds its time limit."""


class Trials:
    """Compiles guides in other processes, to find out whether they can be compiled.

    The result is compiled again by the caller: sending a grammar mostly takes far longer
    (serialising takes 2 s, compiling 27 ms, for a schema of 220 objects).
    """

    def __init__(self, library_text: str, max_bytes: int = _MAX_BYTES) -> None:
        """Start the first process in the background, which takes some seconds.

        ``library_text`` is `Library.to_text`; a guide may take ``max_bytes`` of memory.
        """
        self._library_text = library_text
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        """Guards all fields below, which trial threads use."""
        self._is_closed = False
        self._idle: list[Connection] = []
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        file = os.memfd_create("guides")
        with theirs, open(file, "w+b") as text:
            text.write(self._library_text.encode())
            text.seek(0)
            # The kernel ends the process with this thread: the main thread, or a lasting
            # pool's.
            arguments = (theirs.fileno(), file, self._max_bytes)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD, "CUDA_VISIBLE_DEVICES": ""},
                pass_fds=(theirs.fileno(), file),
            )

    def run(self, kind: str, guide: str, seconds: float, is_wanted: Callable[[], bool]) -> None:
        """Compile ``guide`` for at most ``seconds``.

        Raises:
            RequestError: the guide cannot be compiled.
            TooSlowError: the time limit is exceeded.
            CancelledError: no request wants the guide any more.
        """
        if not is_wanted():
            raise CancelledError
        for _ in range(_ATTEMPTS):
            reason = self._attempt((kind, guide, seconds), is_wanted)
            if reason == TOO_LARGE:
                raise self._too_large()
            if reason:
                raise RequestError(reason)
            if reason is not None:
                return
        raise RequestError("the processes that try guides ended", ErrorKind.UNAVAILABLE)

    def _attempt(
        self, task: tuple[str, str, float], is_wanted: Callable[[], bool]
    ) -> str | None:
        """The reason why the guide cannot be compiled, empty if it can; None if the process
        ended unexpectedly."""
        has_begun = False
        try:
            connection, process = self._take()
        except OSError:
            return None
        try:
            connection.send(task)
            _wait(connection, None, is_wanted)
            has_begun = connection.recv() == BEGUN
            _wait(connection, time.monotonic() + task[2], is_wanted)
            reason: str = connection.recv()
        except (EOFError, OSError):
            connection.close()
            return TOO_LARGE if has_begun and _is_alive(process) else None
        except BaseException:
            # Closing the connection ends the child.
            connection.close()
            raise
        if reason == TOO_LARGE:
            # This child has little memory left for another guide.
            connection.close()
        else:
            self._give_back(connection)
        return reason

    def _too_large(self) -> RequestError:
        return RequestError(
            "guided_decoding_guide ends its compiler, or takes more than "
            f"{self._max_bytes >> 20} MiB of memory to be compiled. Make it smaller: fewer "
            "texts, fewer alternatives, or lower counts ({m,n}, maxLength, maxItems)."
        )

    def _take(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        """A connection to an idle child, and the process that forked it.

        Raises:
            OSError: no child is idle and none can be forked.
        """
        with self._lock:
            if self._process.poll() is not None and not self._is_closed:
                self._control.close()
                # Children end with the process that forked them.
                self._idle.clear()
                self._start()
            if self._idle:
                return self._idle.pop(), self._process
            ours, theirs = socket.socketpair()
            with ours, theirs:
                try:
                    socket.send_fds(self._control, [b"t"], [theirs.fileno()])
                except OSError:
                    # The process is about to end; the next call starts another.
                    self._process.wait()
                    raise
                return Connection(ours.detach()), self._process

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)

    def close(self) -> None:
        """Kill the process and its children, and so all trials."""
        with self._lock:
            self._is_closed = True
            self._process.kill()
            self._process.wait()
            self._control.close()
            self._idle.clear()


def _is_alive(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process still runs after one of its children ended."""
    try:
        process.wait(_LATER_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _wait(connection: Connection, end: float | None, is_wanted: Callable[[], bool]) -> None:
    """Return when an answer can be read, or the connection is closed."""
    while not connection.poll(_LOOK_S):
        if not is_wanted():
            raise CancelledError
        if end is not None and time.monotonic() > end:
            raise TooSlowError
