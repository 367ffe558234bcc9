"""A model's string parameters, read under the strict rules of the served interface."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from trimaran.comm.errors import ConfigError
from trimaran.server.repository.config_pbtxt import is_placeholder

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
        """A plain decimal integer of 64 bits: processes tell each other no larger ones.

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
