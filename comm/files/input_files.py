"""Reads files that operators write: text, JSON, and a tokenizer's special tokens."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from trimaran.comm.errors import ConfigError

UTF8 = "utf-8-sig"
"""UTF-8 that drops a byte order mark, which editors on Windows put at the beginning."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Older tokenizers have the second file; if both name a token, the first file counts."""


class NoFileError(OSError):
    """The path leads to a FIFO, socket or device, which is not read as a file."""

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        super().__init__(errno.EINVAL, f"it is {kind}, not a file", os.fspath(path))

    def __str__(self) -> str:
        return self.strerror or ""


def require_file(path: str | os.PathLike[str]) -> None:
    """Refuse a path whose reading may never end, such as a FIFO without a writer.

    Raises:
        OSError: the path does not exist; `NoFileError`: the path is no file. Folders pass.
    """
    kind = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    if kind is not None:
        raise NoFileError(path, kind)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file in UTF-8.

    Raises:
        OSError: see `require_file`, or the file cannot be read.
        UnicodeDecodeError: the text is not UTF-8.
    """
    require_file(path)
    with open(path, encoding=UTF8) as file:
        return file.read()


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: the text is no JSON, or nested too deep to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def unreadable(what: str, error: OSError | UnicodeError) -> ConfigError:
    """The error for an unreadable file or folder, with a remedy; ``what`` is the name before
    "cannot be read"."""
    return ConfigError(f"{what} cannot be read: {error}. {_remedy(error)}")


def _remedy(error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError):
        return "Save it as UTF-8."
    if isinstance(error, PermissionError):
        return f"Let the user {os.geteuid()} read it, and enter every folder above it."
    if isinstance(error, FileNotFoundError):
        return "Put it there, or name another."
    if isinstance(error, (NoFileError, IsADirectoryError)):
        return "Put a file in its place."
    return "Look after the disk or network share that it lies on."


def special_tokens(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """The texts of the tokens of these names (``eos_token``) that the folder's files give.

    Raises:
        ConfigError: a file cannot be read, or a token is invalid; names file, key and value.
    """
    found: dict[str, str] = {}
    for file_name in _TOKENIZER_FILES:
        path = folder / file_name
        values = read_json_object(path) if path.exists() else {}
        for name in names:
            text = _token_text(path, name, values.get(name))
            if text:
                found.setdefault(name, text)
    return found


def read_json_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file.

    Raises:
        ConfigError: the file cannot be read, or holds no object; names the file.
    """
    try:
        values = parse_json(read_text(path))
    except OSError as error:
        raise unreadable(f"{path}:", error) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: holds a {type(values).__name__}, not an object. Copy the folder again."
        )
    return values


def _token_text(path: Path, name: str, token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str):
        return text
    if token is None:
        return ""
    raise ConfigError(
        f"{path}: {name} is {token!r} but must be a string, or an object whose content is one. "
        "Write the token's text there, not its id."
    )
