"""The /dev/shm of a server under test: its own, or the machine's as it was before."""

from __future__ import annotations

import os
import subprocess
from typing import Protocol


class Shm(Protocol):
    """A /dev/shm in which a server's files can be told from those of others."""

    @property
    def prefix(self) -> list[str]:
        """Words before a command line that runs with this /dev/shm."""

    def files(self) -> list[str]:
        """Names of the server's files."""

    def close(self) -> None:
        """Give it back; what lies there may go with it."""


class PrivateShm:
    """A file system of its own, in a mount namespace that a process keeps. Needs root."""

    def __init__(self) -> None:
        script = "mount -t tmpfs tmpfs /dev/shm && echo && exec sleep infinity"
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        with self._holder.stdout as stdout:
            assert stdout.readline() == b"\n", "no mount namespace: this needs root"

    @property
    def prefix(self) -> list[str]:
        """See `Shm`."""
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--"]

    def files(self) -> list[str]:
        """See `Shm`."""
        return sorted(os.listdir(f"/proc/{self._holder.pid}/root/dev/shm"))

    def close(self) -> None:
        """See `Shm`."""
        self._holder.kill()
        self._holder.wait()


class SharedShm:
    """The machine's /dev/shm, if no other program is started meanwhile."""

    def __init__(self) -> None:
        self._before = set(os.listdir("/dev/shm"))

    @property
    def prefix(self) -> list[str]:
        """See `Shm`."""
        return []

    def files(self) -> list[str]:
        """See `Shm`."""
        return sorted(set(os.listdir("/dev/shm")) - self._before)

    def close(self) -> None:
        """See `Shm`."""
