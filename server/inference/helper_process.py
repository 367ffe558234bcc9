"""Processes that do long work for one front end, each at the end of a socket.

The module that a process runs has a function `main`, which calls `serve_front_end`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Callable
from multiprocessing.connection import Connection

import tritonclient

_PR_SET_PDEATHSIG = 1
_NICENESS = 5
"""The sender of a long request waits, and other clients do not."""

_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    f"from {__name__} import leave_out_clients; leave_out_clients(); "
    "from {} import main; main()"
)


class HelperProcess:
    """One process and the connection to it.

    The process ends with the thread that started it: the thread of the event loop.
    """

    def __init__(self, module: str) -> None:
        """Start ``main`` of a module."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(module), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self.connection = Connection(ours.detach())
        """Closed with the last reference, which an exchange under way may hold. After the
        process's end, sending raises an OSError and receiving an EOFError."""

    @property
    def pid(self) -> int:
        """The process's id, also after its end."""
        return self._process.pid

    def kill(self) -> None:
        """End the process without waiting, and with it an exchange under way."""
        self._process.kill()

    def reap(self) -> None:
        """Return once the process has ended, which takes a while where it has much memory."""
        self._process.wait()


def leave_out_clients() -> None:
    """Let `tritonclient.grpc` have its messages alone. Its client and the gRPC library take 12
    MB of each process, and a helper calls neither."""
    package = types.ModuleType("tritonclient.grpc")
    package.__path__ = [os.path.join(folder, "grpc") for folder in tritonclient.__path__]
    sys.modules[package.__name__] = package


def serve_front_end(serve: Callable[[Connection], None]) -> None:
    """Call ``serve`` for one task after the other, until the front end has ended.

    The front end is at the other end of the socket whose descriptor is argument 1.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # Set by the kernel, so that it works while a task holds the interpreter.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(_NICENESS)
    connection = Connection(int(sys.argv[1]))
    try:
        while True:
            serve(connection)
    except (EOFError, ConnectionError):
        return
