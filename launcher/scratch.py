"""Where an MPI library keeps its files on this host, so that a killed group leaves none."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from trimaran.launcher.run_dir import RunDir

_SHARED_MEMORY = "/dev/shm"


class MpiScratch:
    """Two folders a group, on disk and in shared memory, which are deleted when it has ended.

    Open MPI deletes its session folders and shared-memory segments itself, but not when it
    is killed, as everything is that hangs. Other MPIs are not told of these folders.
    """

    def __init__(self, run_dir: RunDir) -> None:
        """May raise ConfigError: /dev/shm takes no files."""
        self._disk = run_dir.path / "mpi"
        self._memory = RunDir(_SHARED_MEMORY)

    def session_env(self, tag: str) -> dict[str, str]:
        """What tells mpirun, and an MPI without one, where its session folder goes.

        Only the processes of this host take these, so groups on others may have them too.
        """
        base = str(self._disk / _folder_name(tag))
        return {
            "PRTE_MCA_prte_local_tmpdir_base": base,
            "OMPI_MCA_orte_local_tmpdir_base": base,
        }

    def segment_env(self, tag: str) -> dict[str, str]:
        """What tells the ranks of a group that is on this host alone where segments go."""
        folder = str(self._memory.path / _folder_name(tag))
        return {
            "OMPI_MCA_btl_sm_backing_directory": folder,
            "OMPI_MCA_btl_vader_backing_directory": folder,
        }

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
