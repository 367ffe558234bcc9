"""The JSON types that keys of configuration files must have, and the check against them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

from trimaran.comm.errors import ConfigError

_BITS_OF_WHOLE = 32
"""Torch has 64 bits, but products of sizes must fit as well."""


def _is_whole(value: Any) -> bool:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole and value.bit_length() < _BITS_OF_WHOLE


def _is_number(value: Any) -> bool:
    # Python's `json` reads NaN and Infinity, and 1e999 as Infinity.
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_amount(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_one, value))


class JsonType(Enum):
    """A JSON type; the value is its description in error messages."""

    INTEGER = "a whole number of 32 bits"
    NUMBER = "a finite number"
    POSITIVE = "a finite number above 0"
    AMOUNT = "a finite number of 0 or more"
    TEXT = "a string"
    FLAG = "true or false"
    OBJECT = "an object"
    INTEGERS = "a list of whole numbers"
    AMOUNTS = "a list of one or more finite numbers of 0 or more"
    POSITIVES = "a list of finite numbers above 0"
    TEXTS = "a list of strings"
    INTEGER_OR_INTEGERS = "a whole number or a list of them"

    def fits(self, value: Any) -> bool:
        """Whether a value that `json` has read is of this type."""
        return _CHECKS[self](value)


_CHECKS: dict[JsonType, Callable[[Any], bool]] = {
    JsonType.INTEGER: _is_whole,
    JsonType.NUMBER: _is_number,
    JsonType.POSITIVE: _is_positive,
    JsonType.AMOUNT: _is_amount,
    JsonType.AMOUNTS: lambda value: bool(value) and _list_of(_is_amount)(value),
    JsonType.TEXT: _is_text,
    JsonType.FLAG: lambda value: isinstance(value, bool),
    JsonType.OBJECT: lambda value: isinstance(value, Mapping),
    JsonType.INTEGERS: _list_of(_is_whole),
    JsonType.POSITIVES: _list_of(_is_positive),
    JsonType.TEXTS: _list_of(_is_text),
    JsonType.INTEGER_OR_INTEGERS: lambda value: _is_whole(value) or _list_of(_is_whole)(value),
}


def check_types(
    values: Mapping[str, Any],
    types: Mapping[str, JsonType],
    *,
    inside: str = "",
    may_be_null: bool = True,
) -> None:
    """Refuse values of other types than those of their keys; unlisted keys may have any value.

    Raises:
        ConfigError: names the key, prefixed by ``inside``, and its value.
    """
    for key, value in values.items():
        wanted = types.get(key)
        if wanted is None or (value is None and may_be_null) or wanted.fits(value):
            continue
        raise ConfigError(f"{inside}{key} is {value!r} but must be {wanted.value}")


_TYPE_OF_ANNOTATION = {
    "int": JsonType.INTEGER,
    "float": JsonType.NUMBER,
    "str": JsonType.TEXT,
    "bool": JsonType.FLAG,
    "dict[str, Any]": JsonType.OBJECT,
    "tuple[int, ...]": JsonType.INTEGERS,
}
_OR_NULL = " | None"


def check_field_types(owner: type, values: Mapping[str, Any], *, inside: str = "") -> None:
    """Refuse values whose type differs from that of the field with the same name.

    Raises:
        ConfigError: names the key, prefixed by ``inside``, and its value.
    """
    types: dict[str, JsonType] = {}
    for field in fields(owner):
        if field.name not in values:
            continue
        # Annotations are strings, because all modules import `annotations` from `__future__`.
        annotation = str(field.type)
        types[field.name] = _TYPE_OF_ANNOTATION[annotation.removesuffix(_OR_NULL)]
        if annotation.endswith(_OR_NULL) and values.get(field.name) is None:
            del types[field.name]
    check_types(values, types, inside=inside, may_be_null=False)
