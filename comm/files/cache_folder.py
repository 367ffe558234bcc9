"""The folder in which results are kept that are costly to make again."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


def cache_folder(purpose: str, otherwise: str) -> Path:
    """The folder for ``purpose`` in the user's cache, or a new folder for each process where
    there is none; a warning then says ``otherwise``."""
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        root = Path(named) if named else Path.home() / ".cache"
    except RuntimeError:
        # The user has no name, as in a container that was started with a numeric user id.
        return _own_folder(purpose, f"no home folder: {otherwise}")
    return _writable_folder(root, purpose, otherwise)


@functools.cache
def _writable_folder(root: Path, purpose: str, otherwise: str) -> Path:
    folder = root / "trimaran" / purpose
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _own_folder(purpose, f"{folder} is not writable: {otherwise}")


@functools.cache
def _own_folder(purpose: str, warning: str) -> Path:
    """A folder that is deleted when this process ends."""
    logger.warning("%s", warning)
    folder = Path(tempfile.mkdtemp(prefix=f"trimaran-{purpose}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
