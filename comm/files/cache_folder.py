"""The folder in which results are kept that are costly to make again."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_ROOTS = (Path("/var/tmp"), Path("/tmp"))
"""The same for all processes of a user: TMPDIR is another folder in each session of MPI."""


def cache_folder(purpose: str, otherwise: str) -> Path:
    """The folder for ``purpose`` in the user's cache, else among temporary files.

    A warning names the second kind of folder. Where another user has taken its name, each
    process has a folder of its own, and a warning says ``otherwise``.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        root = Path(named) if named else Path.home() / ".cache"
    except RuntimeError:
        # The user has no name, as in a container that was started with a numeric user id.
        return _temporary_folder(purpose, "no home folder", otherwise)
    return _writable_folder(root, purpose, otherwise)


@functools.cache
def _writable_folder(root: Path, purpose: str, otherwise: str) -> Path:
    folder = root / "trimaran" / purpose
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and _is_trusted(folder):
            return folder
    except OSError:
        pass
    return _temporary_folder(
        purpose, f"{folder} is not writable, or other users can write into it", otherwise
    )


@functools.cache
def _temporary_folder(purpose: str, reason: str, otherwise: str) -> Path:
    """A folder of this user alone, else one that is deleted when this process ends."""
    for root in _ROOTS:
        folder = root / f"trimaran-{purpose}-{os.getuid()}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if _is_private(folder):
                logger.warning("%s: %s are kept in %s", reason, purpose, folder)
                return folder
        except OSError:
            continue
    logger.warning("%s: %s", reason, otherwise)
    folder = Path(tempfile.mkdtemp(prefix=f"trimaran-{purpose}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_trusted(folder: Path) -> bool:
    """Whether no unrelated user can put files into a folder of compiled code."""
    status = folder.stat()
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & stat.S_IWOTH


def _is_private(folder: Path) -> bool:
    """Whether no other user can put files into a folder, which processes trust."""
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_own and not status.st_mode & 0o077 and os.access(folder, os.W_OK)
