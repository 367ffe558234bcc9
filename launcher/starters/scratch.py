"""Where an MPI library keeps its files on this host, so that a killed group leaves none."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from trimaran.launcher.starters.run_dir import RunDir

_SHARED_MEMORY = "/dev/shm"
_TRANSPORTS = "OMPI_MCA_btl"


class MpiScratch:
    """Two folders a group, on disk and in shared memory, which are deleted when it has ended.

    Open MPI deletes its session folders and shared-memory segments itself, but not when it
    is killed, as everything is that hangs. Other MPIs are not told of these folders.
    """

    def __init__(self, run_dir: RunDir) -> None:
        """May raise ConfigError: /dev/shm takes no files."""
        self._disk = run_dir.path / "mpi"
        self._memory = RunDir(_SHARED_MEMORY)

    def env(self, tag: str, *, is_here_alone: bool) -> dict[str, str]:
        """What tells the MPI of a group; ``is_here_alone``: it has ranks on this host only.

        The base of session folders is one that the processes of other hosts do not take.
        Segments on another host could not be deleted, so there are none: MPI only starts
        the ranks and carries control between hosts, over TCP then.
        """
        disk, memory = map(str, self._folders(tag))
        # Open MPI 4 passes such a variable on to ranks, which take it for a contradiction.
        sessions = {"PRTE_MCA_prte_local_tmpdir_base": disk}
        segments = {
            # Where Open MPI 4 and a singleton have their folders.
            "TMPDIR": disk,
            "OMPI_MCA_btl_sm_backing_directory": memory,
            "OMPI_MCA_btl_vader_backing_directory": memory,
        }
        if is_here_alone:
            return {**sessions, **segments}
        return {**sessions, _TRANSPORTS: os.environ.get(_TRANSPORTS, "self,tcp")}

    def prepare(self, tag: str) -> None:
        """Make the folders of a group that is about to be started."""
        for folder in self._folders(tag):
            folder.mkdir(parents=True, exist_ok=True)

    def clear(self, tag: str) -> None:
        """Delete what a group has left, none of whose processes lives."""
        for folder in self._folders(tag):
            shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        """Delete what all groups have left."""
        shutil.rmtree(self._disk, ignore_errors=True)
        self._memory.remove()

    def _folders(self, tag: str) -> tuple[Path, Path]:
        name = _folder_name(tag)
        return self._disk / name, self._memory.path / name


def _folder_name(tag: str) -> str:
    """A group's tag as the name of a folder; Open MPI cuts some values at ``:`` and ``,``."""
    return re.sub(r"[^A-Za-z0-9._-]", lambda match: f"%{ord(match[0]):x}", tag)
