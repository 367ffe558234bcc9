"""Whether the files behind a model have changed since it was loaded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from trimaran.server.repository.model_parameters import ModelParameters


def fingerprint(folder: Path, parameters: ModelParameters | None) -> str:
    """A digest of names, sizes and times of a model's files; reads none of them.

    These are all files below its folder, and, where its configuration can be read, those
    that lie in a folder which a parameter names: the engine, the tokenizer.
    """
    digest = hashlib.sha256()
    for line in _files(folder):
        digest.update(os.fsencode(line))
    for named in [] if parameters is None else _named_folders(parameters):
        for line in _entries(named):
            digest.update(os.fsencode(line))
    return digest.hexdigest()


def _named_folders(parameters: ModelParameters) -> list[str]:
    values = [parameters.get_str(name) for name in sorted(parameters.names)]
    return [value for value in values if value is not None and os.path.isdir(value)]


def _files(folder: Path) -> Iterator[str]:
    for parent, folders, _ in os.walk(folder):
        folders.sort()
        yield from _entries(parent)


def _entries(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(_line(entry) for entry in entries)
    except OSError as error:
        # Gone or unreadable is a state of its own, which the load that follows explains.
        return [f"{folder}: {error.errno}\n"]


def _line(entry: os.DirEntry[str]) -> str:
    try:
        stat = entry.stat()
    except OSError as error:
        # A link to nothing, as an editor leaves beside a file: the others count as ever.
        return f"{entry.path} {error.errno}\n"
    # A folder's own time changes with every lock file in it; what is in it counts.
    times = "" if entry.is_dir() else f"{stat.st_mtime_ns} {stat.st_size}"
    return f"{entry.path} {times}\n"
