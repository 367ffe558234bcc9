"""The /dev/shm of a server under test: a private mount, or the machine's with its earlier
files."""

from __future__ import annotations

import os
import subprocess
from typing import Protocol


class Shm(Protocol):
    """A /dev/shm in which a server's files can be distinguished from other files."""

    @property
    def prefix(self) -> list[str]:
        """Words before a command line that runs with this /dev/shm."""

    def files(self) -> list[str]:
        """Names of the server's files."""

    def close(self) -> None:
        """Release the mount; its files may be deleted."""


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
    """The machine's /dev/shm. Correct only if no other program starts in the meantime."""

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
