"""Adapters in subfolders of one folder, by name or by task id, read when they are needed."""

from __future__ import annotations

import errno
from collections.abc import Hashable
from pathlib import Path

from trimaran.worker.lora.formats import (
    AdapterSource,
    is_adapter_folder,
    read_folder,
    version_of,
)
from trimaran.worker.lora.layout import AdapterFormatError

_MAX_ID = (1 << 64) - 1
_MAX_DIGITS = 20


class AdapterFolders:
    """The subfolders of ``lora_prefetch_dir``. A folder whose name is a number is that task.

    Folders that come later, or whose weights are replaced, are found too.
    """

    def __init__(self, root: str) -> None:
        self._root = Path(root) if root else None

    def find(self, key: int | str) -> Path | None:
        """The folder of a task id or name, if there is one."""
        name = str(key)
        # A client may ask for any name: none leads out of the folder.
        if self._root is None or Path(name).name != name or name in ("", ".."):
            return None
        folder = self._root / name
        try:
            return folder if is_adapter_folder(folder) else None
        except OSError as error:
            # Some names no folder could have.
            if error.errno == errno.ENAMETOOLONG:
                return None
            raise AdapterFormatError(f"{folder}: {error.strerror}") from None

    def all(self) -> list[tuple[int | str, Path]]:
        """All adapters, in order of their names."""
        return [(key_of(name), self._root / name) for name in self.names() if self._root]

    def names(self) -> list[str]:
        """The names of all adapters, sorted."""
        if self._root is None:
            return []
        try:
            return sorted(p.name for p in self._root.iterdir() if is_adapter_folder(p))
        except OSError as error:
            raise AdapterFormatError(f"{self._root}: {error.strerror}") from None

    def content(self, folder: Path) -> tuple[Hashable, ...]:
        """Equal as long as the folder's files are not replaced."""
        return str(folder), version_of(folder)

    def unknown(self, folder: Path) -> tuple[Hashable, ...]:
        """Equal to no `content`."""
        return (str(folder),)

    def is_still(self, folder: Path, content: object) -> bool:
        """Whether the folder's files are those of this content, and all of them there."""
        try:
            return self.content(folder) == content
        except AdapterFormatError:
            return False

    def holds(self, content: object) -> bool:
        """Whether this content is one of a folder."""
        return isinstance(content, tuple)

    def read(self, folder: Path) -> AdapterSource:
        """The adapter of a folder.

        Raises:
            AdapterFormatError: names the file and what is wrong with it.
        """
        try:
            return read_folder(folder)
        except AdapterFormatError:
            raise
        # Numbers that are too long to be any, and lists in lists without an end.
        except (ValueError, OverflowError, RecursionError) as error:
            raise AdapterFormatError(f"{folder}: cannot be read: {error}") from None


def key_of(name: str) -> int | str:
    """What an adapter of this name is looked up by: a task id if it is one."""
    if len(name) > _MAX_DIGITS or not name.isdecimal():
        return name
    is_task = int(name) <= _MAX_ID and str(int(name)) == name
    return int(name) if is_task else name
