"""The process that forks children to compile guides, each of which can be killed at any
time."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from trimaran.comm.errors import RequestError
from trimaran.worker.guided.library import Library

_PR_SET_PDEATHSIG = 1
_CACHE_BYTES = 1 << 27
BEGUN = "begun"
TOO_LARGE = "too large"


def main() -> None:
    """Serve the rank at the other end of the socket whose file descriptor is argument 1.

    The rank sends one end of a connection for each child that it wants. Argument 2 is the file
    descriptor of `Library.to_text`, argument 3 the bytes of memory for one guide.
    """
    # The rank ends this process; a signal to the whole job must not interrupt it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    with open(int(sys.argv[2])) as file:
        library = Library.from_text(file.read(), _CACHE_BYTES)
    # The exit codes of children are not collected.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # No garbage collection here: it would write to, and so copy, the pages that children share.
    gc.freeze()
    pid = os.getpid()
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        # This process has a single thread, so a fork lacks none.
        if os.fork() == 0:
            control.close()
            _die_with_parent()
            if os.getppid() == pid:
                _serve(library, Connection(descriptors[0]), int(sys.argv[3]))
            os._exit(0)
        os.close(descriptors[0])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(library: Library, connection: Connection, max_bytes: int) -> None:
    """For each guide send `BEGUN`, then the reason why it cannot be compiled, or an empty text.

    Ends the process when the other end is closed, even during a compilation.
    """
    _limit_memory(max_bytes)
    threading.Thread(target=_end_when_left, args=(connection,), daemon=True).start()
    # The rank cancels a guide by closing its end: this thread may be the first to notice.
    with suppress(EOFError, OSError):
        while True:
            kind, guide, seconds = connection.recv()
            # If the rank is stopped, this process must end all the same.
            signal.alarm(math.ceil(seconds) + 1)
            connection.send(BEGUN)
            answer = _reason(library, kind, guide)
            signal.alarm(0)
            connection.send(answer)


def _end_when_left(connection: Connection) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def _limit_memory(max_bytes: int) -> None:
    """Limit the memory that this process may take from now on, and disable core dumps."""
    with open("/proc/self/statm") as file:
        num_bytes = int(file.read().split()[0]) * resource.getpagesize() + max_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        num_bytes = min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _reason(library: Library, kind: str, guide: str) -> str:
    """The reason why the guide cannot be compiled; empty if it can."""
    try:
        library.compile(kind, guide)
    except RequestError as error:
        return TOO_LARGE if "bad_alloc" in str(error) else str(error)
    except MemoryError:
        return TOO_LARGE
    return ""
