"""The folders of one run: its sockets, and the session directories of each group's MPI."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.launcher.starters.loopback_only import LoopbackOnly

_PREFIX = "trimaran-"
_LOCK = "lock"
_LONGEST_SOCKET_PATH = 107
"""Limit of the kernel on the path of a Unix socket, in bytes."""

_LONGEST_NAME = len("/frontend-000.sock")

_SHARED_MEMORY = "/dev/shm"
_TRANSPORTS = "OMPI_MCA_btl"


class RunDir:
    """A new folder, locked while this process lives; folders of dead runs are swept."""

    def __init__(self, parent: str | None = None) -> None:
        base, variable = (Path(parent), "TMPDIR") if parent else _base()
        try:
            _sweep(base)
            self.path, self._lock = _locked_folder(base)
        except OSError as error:
            raise ConfigError(
                f"cannot make a folder for sockets in {base}: {error.strerror}. Name a "
                f"writable one in {variable}."
            ) from None
        if len(os.fsencode(self.path)) + _LONGEST_NAME > _LONGEST_SOCKET_PATH:
            self.remove()
            raise ConfigError(
                f"{base} is too long a path for Unix sockets (limit {_LONGEST_SOCKET_PATH} "
                f"bytes in all). Name a shorter one in {variable}."
            )

    def socket(self, name: str) -> str:
        """The address of a Unix socket in this folder."""
        return f"unix:{self.path / name}.sock"

    def remove(self) -> None:
        """Delete the folder. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _base() -> tuple[Path, str]:
    """The parent folder of runs, and the variable that overrides it."""
    # A batch job and `su` keep XDG_RUNTIME_DIR, although the folder may not exist there or
    # belong to another user.
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime), "XDG_RUNTIME_DIR"
    return Path(tempfile.gettempdir()), "TMPDIR"


def _locked_folder(base: Path) -> tuple[Path, int]:
    """A new folder below ``base``, and the descriptor that keeps it locked."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(path / _LOCK)):
                return path, lock
        except (BlockingIOError, FileNotFoundError):
            pass
        # Another server deleted the folder before it was locked.
        os.close(lock)


def _sweep(base: Path) -> None:
    """Delete folders whose owner died without deleting them."""
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:
            # Not locked yet by its owner, or no permission.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(lock)


class MpiSessionDirs:
    """Two folders a group, on disk and in shared memory, deleted when the group has ended.

    Open MPI deletes its session folders and shared-memory segments itself, but not when it
    is killed, as every hanging process is. Other MPIs do not use these folders.
    """

    def __init__(self, run_dir: RunDir) -> None:
        """May raise ConfigError: /dev/shm cannot be written."""
        self._disk = run_dir.path / "mpi"
        self._loopback = LoopbackOnly(run_dir.path)
        self._memory = RunDir(_SHARED_MEMORY)

    def env(self, tag: str, *, is_here_alone: bool) -> dict[str, str]:
        """The variables for a group's MPI; ``is_here_alone``: all its ranks are on this host.

        The base of session folders does not reach the processes of other hosts. Segments on
        another host could not be deleted, so groups of several hosts use none: MPI starts their
        ranks and carries control messages between hosts, over TCP.
        """
        disk, memory = map(str, self._folders(tag))
        # Open MPI 4 passes such a variable on to ranks, which then report a conflict.
        # In memory: on a full disk, the mapped files of PMIx kill mpirun by SIGBUS.
        sessions = {"PRTE_MCA_prte_local_tmpdir_base": memory}
        segments = {
            # The folders of Open MPI 4 and of a singleton.
            "TMPDIR": disk,
            "OMPI_MCA_btl_sm_backing_directory": memory,
            "OMPI_MCA_btl_vader_backing_directory": memory,
        }
        if is_here_alone:
            return {**sessions, **segments}
        return {**sessions, _TRANSPORTS: os.environ.get(_TRANSPORTS, "self,tcp")}

    def loopback_env(self) -> dict[str, str]:
        """The variables that keep Open MPI on loopback, for groups of this host alone."""
        return self._loopback.env()

    def prepare(self, tag: str) -> None:
        """Create the folders of a group before its start."""
        for folder in self._folders(tag):
            folder.mkdir(parents=True, exist_ok=True)

    def clear(self, tag: str) -> None:
        """Delete the folders of a group without living processes."""
        for folder in self._folders(tag):
            shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        """Delete the folders of all groups."""
        shutil.rmtree(self._disk, ignore_errors=True)
        self._memory.remove()

    def _folders(self, tag: str) -> tuple[Path, Path]:
        name = _folder_name(tag)
        return self._disk / name, self._memory.path / name


def _folder_name(tag: str) -> str:
    """A group's tag as the name of a folder; Open MPI cuts some values at ``:`` and ``,``."""
    return re.sub(r"[^A-Za-z0-9._-]", lambda match: f"%{ord(match[0]):x}", tag)
