"""The record of an unfinished build, from which the next build with equal settings goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

JOURNAL_FILE = "journal.jsonl"

Checksums = dict[str, dict[str, str]]
"""Checksums of a unit's tensors, as `ShardLayout.header` takes them, by name and by rank, whose
number is a string in JSON."""


class Journal:
    """A line for the build, and a line with checksums for each unit that was written.

    After a loss of power a recorded unit may be missing; its checksums reveal that.
    """

    def __init__(self, folder: Path, build: dict[str, Any]) -> None:
        """Read the journal of ``folder``; first empty the folder if it is of another build.

        ``build`` holds all values that the result depends on, as JSON values.
        """
        self._path = folder / JOURNAL_FILE
        lines = _lines_of(self._path)
        if not lines or lines[0] != {"build": json.loads(json.dumps(build))}:
            empty(folder)
            lines = []
        self.finished: dict[str, Checksums] = {
            line["unit"]: line["checksums"] for line in lines[1:]
        }
        # Rewrite the journal: its last line may have been cut short.
        written = self._path.with_suffix(".new")
        with written.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines or [{"build": build}])
        written.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def add(self, unit: str, checksums: Checksums) -> None:
        """Record that a unit was written."""
        if self.finished.get(unit) != checksums:
            self.finished[unit] = checksums
            self._append({"unit": unit, "checksums": checksums})

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def has_finished_units(folder: Path) -> bool:
    """Whether a later build could go on with the folder's contents."""
    return len(_lines_of(folder / JOURNAL_FILE)) > 1


def stamp(path: Path) -> tuple[int, int]:
    """Size and time of a file: a build does not go on with another one."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def empty(folder: Path) -> None:
    """Remove everything in a folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _lines_of(path: Path) -> list[dict[str, Any]]:
    """All complete lines."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    lines: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            break
        if not isinstance(values, dict) or (lines and not {"unit", "checksums"} <= set(values)):
            break
        lines.append(values)
    return lines
