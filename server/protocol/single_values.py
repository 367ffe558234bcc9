"""Single values in JSON: what the tensor of one value holds, without the tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import Any

_SHORT_ID = 128
_FLOAT32 = Struct("<f")
_LARGEST = 1e30


class NotPlainError(Exception):
    """A value that needs a closer look."""


def is_short_id(value: object) -> bool:
    """Whether a value is an id that needs no closer look."""
    return isinstance(value, str) and len(value) <= _SHORT_ID


def _text(value: Any) -> str:
    if type(value) is not str:
        raise NotPlainError
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise NotPlainError
    return value


def _whole(low: int, high: int, value: Any) -> int:
    if type(value) is not int or not low <= value <= high:
        raise NotPlainError
    return value


def _in_32_bits(value: Any) -> float:
    if type(value) not in (int, float) or not -_LARGEST <= value <= _LARGEST:
        raise NotPlainError
    return float(_FLOAT32.unpack(_FLOAT32.pack(value))[0])


SINGLES: dict[str, Callable[[Any], Any]] = {
    "BYTES": _text,
    "BOOL": _flag,
    "FP32": _in_32_bits,
    "INT32": partial(_whole, -(1 << 31), (1 << 31) - 1),
    "INT64": partial(_whole, -(1 << 63), (1 << 63) - 1),
    "UINT64": partial(_whole, 0, (1 << 64) - 1),
}
"""What a single value of a datatype becomes: the value that the tensor of the value holds.
Raises `NotPlainError`.
"""
