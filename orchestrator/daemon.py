"""MPI's own daemon below the orchestrator: whether it lives, and whether it answers."""

from __future__ import annotations

import os
from pathlib import Path

from trimaran.comm.mpi import MPI

_NOBODY_HAS_THIS_NAME = "trimaran-is-anybody-there"


class SpawnDaemon:
    """The process that MPI starts at the first Spawn to start ranks from, and to mind them.

    All spawned ranks are its children and die with it. MPI itself neither notices its death
    nor that it hangs, and every later Spawn would wait for ever.
    """

    def __init__(self) -> None:
        self.pid = 0
        self._pid_fd = -1

    def find(self) -> bool:
        """Whether it has been found just now, so that `fileno` is new."""
        if self.pid:
            return False
        # MPI's daemon is the only process that the orchestrator itself starts.
        for pid in _children():
            self._pid_fd, self.pid = os.pidfd_open(pid), pid
            return True
        return False

    def fileno(self) -> int:
        """Readable once the daemon has died."""
        return self._pid_fd

    def ask(self) -> None:
        """Have it answer a question; returns only when it has.

        Raises:
            MPI.Exception: it cannot be asked any more.
        """
        try:
            MPI.Lookup_name(_NOBODY_HAS_THIS_NAME)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_NAME:
                raise


def _children() -> list[int]:
    """The processes that this one has started."""
    return [
        int(pid)
        for path in Path("/proc/self/task").glob("*/children")
        for pid in path.read_text(encoding="ascii").split()
    ]
