"""The process whose copies try guides: it is ready, and they can be ended at any time."""

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
    """Serve the rank at the other end of the socket whose descriptor is argument 1.

    It sends one end of a connection for each copy that it wants. Argument 2 is the descriptor
    of a file with `Library.to_text`, argument 3 the bytes of memory for one guide.
    """
    # The rank says when it ends; a signal to the whole job must not cut in.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    with open(int(sys.argv[2])) as file:
        library = Library.from_text(file.read(), _CACHE_BYTES)
    # The exit codes of copies are not collected.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # They need not look for garbage here, which would copy the memory.
    gc.freeze()
    pid = os.getpid()
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        # No thread runs here that a copy would lack.
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
    """Say of each guide `BEGUN` and then why it cannot be compiled, or nothing.

    Ends the process when the other end is closed, be it in the midst of a guide.
    """
    _limit_memory(max_bytes)
    threading.Thread(target=_end_when_left, args=(connection,), daemon=True).start()
    # Cancelling a guide closes the other end: this thread may be the first to notice.
    with suppress(EOFError, OSError):
        while True:
            kind, guide, seconds = connection.recv()
            # Should the other end be stopped, this one ends all the same.
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
    """Let this process have so much more than now, and leave no dump of it."""
    with open("/proc/self/statm") as file:
        num_bytes = int(file.read().split()[0]) * resource.getpagesize() + max_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        num_bytes = min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _reason(library: Library, kind: str, guide: str) -> str:
    """Why the guide cannot be compiled; empty if it was."""
    try:
        library.compile(kind, guide)
    except RequestError as error:
        return TOO_LARGE if "bad_alloc" in str(error) else str(error)
    except MemoryError:
        return TOO_LARGE
    return ""
