"""The JSON types that keys of configuration files have, held against what a file says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from trimaran.comm.errors import ConfigError


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_one, value))


class JsonType(Enum):
    """A type by the words that an operator is told."""

    WHOLE = "a whole number"
    NUMBER = "a number"
    TEXT = "a string"
    FLAG = "true or false"
    OBJECT = "an object"
    WHOLES = "a list of whole numbers"
    NUMBERS = "a list of numbers"
    TEXTS = "a list of strings"
    WHOLE_OR_WHOLES = "a whole number or a list of them"

    def fits(self, value: Any) -> bool:
        """Whether a value that `json` has read is of this type."""
        return _CHECKS[self](value)


_CHECKS: dict[JsonType, Callable[[Any], bool]] = {
    JsonType.WHOLE: _is_whole,
    JsonType.NUMBER: _is_number,
    JsonType.TEXT: _is_text,
    JsonType.FLAG: lambda value: isinstance(value, bool),
    JsonType.OBJECT: lambda value: isinstance(value, Mapping),
    JsonType.WHOLES: _list_of(_is_whole),
    JsonType.NUMBERS: _list_of(_is_number),
    JsonType.TEXTS: _list_of(_is_text),
    JsonType.WHOLE_OR_WHOLES: lambda value: _is_whole(value) or _list_of(_is_whole)(value),
}


def check_types(
    values: Mapping[str, Any],
    types: Mapping[str, JsonType],
    *,
    inside: str = "",
    may_be_null: bool = True,
) -> None:
    """Refuse values of another type than their key's; keys without one may be anything.

    Raises:
        ConfigError: names the key, behind ``inside`` if it is an object's, and its value.
    """
    for key, value in values.items():
        wanted = types.get(key)
        if wanted is None or (value is None and may_be_null) or wanted.fits(value):
            continue
        raise ConfigError(f"{inside}{key} is {value!r} but must be {wanted.value}")
