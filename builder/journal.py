"""What an unfinished build has done, so that the next one with the same settings goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

JOURNAL_FILE = "journal.jsonl"

Checksums = dict[str, dict[str, str]]
"""SHA-256 of a unit's tensors by rank number, as JSON has it, and name."""


class Journal:
    """A line for the build, and one for each unit that is written, with its checksums.

    A unit whose line is there may still not be, after a loss of power; its checksums tell.
    """

    def __init__(self, folder: Path, build: dict[str, Any]) -> None:
        """Read the journal of ``folder``; of another build, the folder is emptied first.

        ``build`` holds all that the result depends on, as values of JSON.
        """
        self._path = folder / JOURNAL_FILE
        lines = _lines_of(self._path)
        if not lines or lines[0] != {"build": json.loads(json.dumps(build))}:
            empty(folder)
            lines = []
        self.finished: dict[str, Checksums] = {
            line["unit"]: line["checksums"] for line in lines[1:]
        }
        # Written anew: the last line may have been cut short.
        written = self._path.with_suffix(".new")
        with written.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines or [{"build": build}])
        written.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def add(self, unit: str, checksums: Checksums) -> None:
        """A unit is written."""
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
    """Whether a later build could go on with what is in the folder."""
    return len(_lines_of(folder / JOURNAL_FILE)) > 1


def empty(folder: Path) -> None:
    """Remove everything in a folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines that were written whole."""
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
