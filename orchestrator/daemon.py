"""MPI's own daemon below the orchestrator: whether it lives, and whether it answers."""

from __future__ import annotations

import contextlib
import os

import psutil

from trimaran.comm.errors import ConfigError
from trimaran.comm.mpi import MPI, library_version

_NOBODY_HAS_THIS_NAME = "trimaran-is-anybody-there"
_NO_PROGRAM = "/proc/self/no-such-program"


class SpawnDaemon:
    """The process below this one from which MPI starts ranks, and that minds them.

    All spawned ranks are its children and die with it. MPI itself neither notices its death
    nor that it hangs, and every later Spawn would wait for ever.
    """

    def __init__(self) -> None:
        """Have MPI start it.

        MPI does so within the first Spawn, and badly when another Spawn runs by then. So
        that first one is of a program that does not exist, which fails at once.

        Raises:
            ConfigError: it did not start.
        """
        with contextlib.suppress(MPI.Exception):
            MPI.COMM_SELF.Spawn(_NO_PROGRAM, maxprocs=1)
        # The orchestrator itself starts no process.
        children = [
            child
            for child in psutil.Process().children()
            if child.status() != psutil.STATUS_ZOMBIE
        ]
        if not children:
            raise ConfigError(
                "MPI cannot spawn ranks here: its daemon (prte, of the same Open MPI as "
                f"{library_version()}) did not start. Choose --worker-launch mpirun."
            )
        self.pid = children[0].pid
        self._pid_fd = os.pidfd_open(self.pid)

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
