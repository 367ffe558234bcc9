"""Reads a model's config.pbtxt and its string parameters; errors name file and line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import read_text, unreadable

_PLACEHOLDER = re.compile(r"\$\{(\w+)\}|\$(\w+)")
# A quoted string, or a comment to the end of the line: a placeholder is legal there.
_QUOTED_OR_COMMENT = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|#[^\n]*")
_POSITION = re.compile(r"^\d+:\d+ : ")
_FIELD_BEFORE = re.compile(r"(\w+)\s*:?\s*[\[{]?\s*$")


def read_config(path: Path) -> ModelConfig:
    """Parse one config.pbtxt.

    A placeholder left inside quotes stays in the value, where it means "not set".

    Raises:
        ConfigError: unreadable, a placeholder outside quotes, or not a ModelConfig; the
            message names file, line and remedy.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(f"{path}:", error) from error
    _refuse_open_placeholder(path, text)
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        line = error.GetLine()
        place = f"{path}:{line}" if line is not None else str(path)
        what = _POSITION.sub("", str(error))
        raise ConfigError(f"{place}: not a valid model configuration: {what}") from error


def is_placeholder(value: str) -> bool:
    """Whether a parameter's value is an unfilled placeholder of a template."""
    return _PLACEHOLDER.fullmatch(value.strip()) is not None


def open_placeholders(text: str) -> list[re.Match[str]]:
    """Placeholders outside strings and comments, where only a value is legal."""
    # Blanked rather than removed, so that positions stay those of the text.
    bare = _QUOTED_OR_COMMENT.sub(lambda found: " " * len(found.group()), text)
    return list(_PLACEHOLDER.finditer(bare))


def placeholder_names(found: list[re.Match[str]]) -> list[str]:
    """The names of these placeholders, each once, in the order of the text."""
    return list(dict.fromkeys(match.group(1) or match.group(2) for match in found))


def _refuse_open_placeholder(path: Path, text: str) -> None:
    found = open_placeholders(text)
    if not found:
        return
    start = found[0].start()
    line = text.count("\n", 0, start) + 1
    before = _FIELD_BEFORE.search(text[:start])
    field = f" of field '{before.group(1)}'" if before else ""
    # All names at once: otherwise each start of the server would report only the next one.
    names = placeholder_names(found)
    others = f" (nor are {', '.join(names[1:])})" if len(names) > 1 else ""
    raise ConfigError(
        f"{path}:{line}: the placeholder ${{{names[0]}}}{field} is not filled{others}. Fill: "
        f"trimaran fill-template -i {path} {','.join(f'{name}:VALUE' for name in names)}"
    )


_TRUE = frozenset({"True", "true", "TRUE", "1"})
_FALSE = frozenset({"False", "false", "FALSE", "0"})
_LOOSE_TRUE = frozenset({"true", "1", "t", "y", "yes"})
_LOOSE_FALSE = frozenset({"false", "0", "f", "n", "no"})
_INTEGER = re.compile(r"[+-]?\d{1,100}")
_MAX_INTEGER = (1 << 63) - 1
_T = TypeVar("_T")


class ModelParameters:
    """The ``parameters`` of one config.pbtxt. A key that is absent, empty or still a
    placeholder is not set, and every accessor gives None for it."""

    def __init__(self, values: Mapping[str, str], path: Path) -> None:
        self._values = dict(values)
        self._path = path

    @property
    def names(self) -> tuple[str, ...]:
        """Every key of the file, set or not."""
        return tuple(self._values)

    def get_str(self, key: str) -> str | None:
        """The value, or None if it is not set."""
        value = self._values.get(key, "").strip()
        return None if not value or is_placeholder(value) else value

    def get_int(self, key: str) -> int | None:
        """A plain decimal integer of 64 bits, the largest that messages carry.

        Raises:
            ConfigError: names file, key and value.
        """
        return self._parsed(key, _parse_int, "an integer of at most 64 bits, as in 4096")

    def get_float(self, key: str) -> float | None:
        """A plain decimal number.

        Raises:
            ConfigError: names file, key and value.
        """
        return self._parsed(key, float, "a number, as in 0.9")

    def get_bool(self, key: str) -> bool | None:
        """True/true/TRUE/1 or False/false/FALSE/0.

        Raises:
            ConfigError: names file, key and value.
        """
        return self._parsed(key, _parse_bool, "True or False (also true, TRUE, 1 and so on)")

    def get_loose_bool(self, key: str) -> bool | None:
        """As `get_bool`, with t/f, y/n and yes/no too, in any case.

        Raises:
            ConfigError: names file, key and value.
        """
        return self._parsed(key, _parse_loose_bool, "true, false, yes, no, t, f, y, n, 1 or 0")

    def _parsed(self, key: str, parse: Callable[[str], _T], allowed: str) -> _T | None:
        text = self.get_str(key)
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError:
            raise ConfigError(
                f"{self._path}: parameter '{key}' is {text!r} but must be {allowed}"
            ) from None


def _parse_int(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError(text)
    number = int(text)
    if abs(number) > _MAX_INTEGER:
        raise ValueError(text)
    return number


def _parse_bool(text: str) -> bool:
    if text not in _TRUE | _FALSE:
        raise ValueError(text)
    return text in _TRUE


def _parse_loose_bool(text: str) -> bool:
    if text.lower() not in _LOOSE_TRUE | _LOOSE_FALSE:
        raise ValueError(text)
    return text.lower() in _LOOSE_TRUE
