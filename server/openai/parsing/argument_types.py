"""The types of arguments that models write as texts, from the schemas of tools."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NAMES = {"True": True, "False": False, "None": None}
_MAX_DEPTH = 8
_MAX_VISITS = 1 << 10
"""Schemas and listed values that are looked at for one type. Schemas may refer to each other,
so that a few of them stand for any number; what needs more has no known type."""

_DEFINITIONS = ("#/$defs/", "#/definitions/")


@dataclass(frozen=True, slots=True)
class ArgumentType:
    """What a schema allows as a value."""

    kinds: frozenset[str] = frozenset()
    """Types of JSON; empty: any."""

    choices: tuple[str, ...] = ()
    """The texts that are allowed, where the schema lists them."""

    @property
    def is_any_text(self) -> bool:
        """Whether the value is a text, whatever the model writes."""
        return self.kinds == {"string"} and not self.choices

    def json_of(self, text: str) -> str:
        """The JSON of a value that was written as ``text``."""
        for choice in (text, text.strip()):
            if choice in self.choices:
                return json.dumps(choice, ensure_ascii=False)
        stripped = text.strip()
        try:
            value, written = _NAMES[stripped], ""
        except KeyError:
            value, written = _read(text)
        else:
            written = json.dumps(value)
        if written and self._allows(value):
            return written
        if "string" in self.kinds:
            return json.dumps(text, ensure_ascii=False)
        return written or self._python_json(stripped) or json.dumps(text, ensure_ascii=False)

    def _python_json(self, text: str) -> str:
        """The JSON of a list or an object that is written in Python's syntax, or nothing."""
        if not self.kinds or text[:1] not in ("[", "{"):
            return ""
        try:
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return ""

    def _allows(self, value: Any) -> bool:
        return not self.kinds or bool(_kinds_of(value) & self.kinds)


def _read(text: str) -> tuple[Any, str]:
    """A JSON value and its text; an empty text if there is none."""
    try:
        return json.loads(text, parse_constant=_refuse), text.strip()
    except (ValueError, RecursionError):
        return None, ""


def _refuse(name: str) -> Any:
    """NaN and infinities are no JSON."""
    raise ValueError(name)


def _kinds_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    names = {str: "string", type(None): "null", list: "array", dict: "object"}
    return {names[type(value)]}


def argument_type(schema: Mapping[str, Any], key: str) -> ArgumentType | None:
    """The type of a function's argument; None if the schema does not tell the type."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return _Search(schema).type_of(found)


def type_of(schema: Any, root: Mapping[str, Any]) -> ArgumentType | None:
    """The type of a value within a function's arguments, whose schema is ``root``."""
    return _Search(root).type_of(schema)


def member_schema(schema: Any, root: Mapping[str, Any], key: str) -> Any:
    """The schema of a member of an object, or of an item of a list for the key ``item``."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return None
        if not isinstance(schema.get("$ref"), str):
            break
        schema = _definition(schema["$ref"], root)
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return schema.get("items") if key == "item" else schema.get("additionalProperties")


class _Search:
    """Finds one type, within `_MAX_VISITS`."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        """``root`` holds the definitions."""
        self._root = root
        self._num_left = _MAX_VISITS

    def type_of(self, schema: Any, depth: int = _MAX_DEPTH) -> ArgumentType | None:
        """The type of a schema's values; None if it is not told, or too far away."""
        self._num_left -= 1
        if not isinstance(schema, Mapping) or depth == 0 or self._num_left < 0:
            return None
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self.type_of(_definition(reference, self._root), depth - 1)
        for name in ("anyOf", "oneOf", "allOf"):
            options = schema.get(name)
            if isinstance(options, list) and options:
                return self._joined(options, depth - 1)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            return self._listed(values)
        named = schema.get("type")
        names = named[:_MAX_VISITS] if isinstance(named, list) else [named]
        kinds = frozenset(name for name in names if isinstance(name, str))
        return ArgumentType(kinds) if kinds else None

    def _listed(self, values: list[Any]) -> ArgumentType | None:
        self._num_left -= len(values)
        if self._num_left < 0:
            return None
        kinds = frozenset().union(*map(_kinds_of, values))
        return ArgumentType(kinds, tuple(each for each in values if isinstance(each, str)))

    def _joined(self, options: list[Any], depth: int) -> ArgumentType | None:
        """What one of several types allows."""
        types: list[ArgumentType] = []
        for option in options:
            found = self.type_of(option, depth)
            if found is None:
                return None
            types.append(found)
        # A free text beside listed texts allows any text.
        is_free = any(each.is_any_text for each in types)
        choices = () if is_free else tuple(text for each in types for text in each.choices)
        return ArgumentType(frozenset().union(*(each.kinds for each in types)), choices)


def _definition(reference: str, root: Mapping[str, Any]) -> Any:
    for prefix in _DEFINITIONS:
        if reference.startswith(prefix):
            definitions = root.get(prefix[2:-1])
            if isinstance(definitions, Mapping):
                return definitions.get(reference.removeprefix(prefix))
    return None
