"""Files that a command writes at its end, looked at before it begins."""

from __future__ import annotations

import os
from pathlib import Path

from trimaran.comm.errors import ConfigError


def check_writable(flag: str, path: str | os.PathLike[str]) -> None:
    """See to it that a file can be written where ``flag`` says; nothing is written yet.

    Raises:
        ConfigError: it cannot, and why.
    """
    file = Path(path)
    folder = file.absolute().parent
    if file.is_dir():
        raise ConfigError(f"{flag} {path} is a folder. Name a file.")
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {folder}. Make it first.")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written. Name another file.")
