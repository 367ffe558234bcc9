"""Reads the members of a request's JSON by name, type and range; errors name the member."""

from __future__ import annotations

import math
from typing import Any

from trimaran.comm.errors import RequestError
from trimaran.server.inference.tensor_bytes import Buffer
from trimaran.server.openai.errors import ApiError
from trimaran.server.protocol import json_access

_LONGEST_SHOWN = 100


def parse_body(body: Buffer, max_input_bytes: int) -> Fields:
    """The members of a body.

    Raises:
        ApiError: no JSON object, or more values than a request may have.
    """
    try:
        json_access.check_json(body, max_input_bytes)
        document = json_access.parse(body)
    except RequestError as error:
        raise ApiError(str(error)) from None
    if not isinstance(document, dict):
        raise ApiError("the body must be a JSON object")
    return Fields(document)


class Fields:
    """The members of one JSON object. A null counts as left out."""

    def __init__(self, members: dict[str, Any], where: str = "") -> None:
        """``where`` names the object in errors; empty for the body itself."""
        self._members = members
        self._where = where
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        """How errors name a member."""
        return f"{self._where}.{name}" if self._where else name

    def take(self, name: str) -> Any:
        """A member of any type; None where it is left out."""
        members = self._members
        if name not in members:
            return None
        self._read.add(name)
        return members[name]

    def has_any(self, names: frozenset[str]) -> bool:
        """Whether a member of these names is given, maybe as a null. Readers ask once for
        members that few requests have."""
        return not names.isdisjoint(self._members)

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number within a range."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(name, value, "a number")
        if not low <= value <= high or not math.isfinite(value):
            raise self.wrong(name, value, f"between {low:g} and {high:g}")
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number within a range."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, value, "a whole number")
        if not low <= value <= high:
            raise self.wrong(name, value, f"between {low} and {high}")
        return value

    def boolean(self, name: str) -> bool | None:
        """True or false."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def needed_text(self, name: str) -> str:
        """A string that must be given."""
        value = self.text(name)
        if value is None:
            raise ApiError(f"'{self.path(name)}' is missing", param=self.path(name))
        return value

    def choice(self, name: str, *choices: str) -> str | None:
        """One of these strings."""
        value = self.text(name)
        if value is not None and value not in choices:
            raise self.wrong(name, value, f"one of {', '.join(choices)}")
        return value

    def items(self, name: str) -> list[Any] | None:
        """A list."""
        value = self.take(name)
        if value is not None and not isinstance(value, list):
            raise self.wrong(name, value, "a list")
        return value

    def member(self, name: str) -> Fields | None:
        """The members of an object within this one."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return Fields(value, self.path(name))

    def plain(self) -> dict[str, Any]:
        """The object itself."""
        return self._members

    def refuse(self, name: str, reason: str) -> None:
        """Refuse a member that is given, unless it is false or empty.

        Raises:
            ApiError: ``reason`` says why.
        """
        if self.take(name):
            raise ApiError(f"'{self.path(name)}' {reason}", param=self.path(name))

    def finish(self, *ignored: str) -> None:
        """Refuse members that were not read, but for ``ignored`` ones.

        Raises:
            ApiError: names the first of them.
        """
        for name in self._members:
            if name not in self._read and name not in ignored:
                path = self.path(name)[:_LONGEST_SHOWN]
                raise ApiError(f"Unrecognized request argument supplied: {path}", param=path)

    def wrong(self, name: str, value: object, wanted: str) -> ApiError:
        """The error of a member with another value than wanted."""
        shown = repr(value)
        if len(shown) > _LONGEST_SHOWN:
            shown = f"{shown[:_LONGEST_SHOWN]}..."
        path = self.path(name)
        return ApiError(f"'{path}' is {shown} but must be {wanted}", param=path)


def list_of(fields: Fields, name: str, kind: type, what: str, most: int) -> list[Any] | None:
    """A list whose items all have one type.

    Raises:
        ApiError: another type, or more items than ``most``.
    """
    values = fields.items(name)
    if values is None:
        return None
    if len(values) > most:
        path = fields.path(name)
        raise ApiError(f"'{path}' has {len(values)} items, and at most {most} are allowed",
                       param=path)  # fmt: skip
    for value in values:
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise fields.wrong(name, value, f"a list of {what}")
    return values


def length_left(left: int, value: object) -> int:
    """What a value of JSON leaves of a number of characters and values; below 0: too little.
    A part that occurs several times counts each time."""
    waiting = [value]
    while waiting and left >= 0:
        item = waiting.pop()
        if isinstance(item, dict):
            left -= sum(map(len, item))
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item
        left -= len(item) if isinstance(item, str) else 1
    return left
