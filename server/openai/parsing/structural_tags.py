"""Forms of structural tags, by which guided decoding allows tool calls alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]
Tag = dict[str, Any]

_MAX_SPACE = 16


@dataclass(frozen=True, slots=True)
class Pieces:
    """Literals as texts and as special tokens, which text alone cannot make."""

    special: frozenset[str] = frozenset()

    def text(self, literal: str) -> list[Tag]:
        """The pieces of a literal."""
        for token in self.special:
            before, found, after = literal.partition(token)
            if found:
                return [
                    *self.text(before),
                    {"type": "token", "token": token},
                    *self.text(after),
                ]
        return [const(literal)] if literal else []


def const(text: str) -> Tag:
    """A text."""
    return {"type": "const_string", "value": text}


def json_schema(schema: Schema) -> Tag:
    """A JSON value by a schema, with little white space in a row, which small models repeat."""
    return {
        "type": "json_schema",
        "json_schema": schema,
        "max_whitespace_cnt": _MAX_SPACE,
    }


def sequence(*elements: Tag) -> Tag:
    """One form after the other."""
    return {"type": "sequence", "elements": list(elements)}


def optional(element: Tag) -> Tag:
    """A form, or nothing."""
    return {"type": "optional", "content": element}


def within(schema: Any, root: Schema) -> Schema:
    """The schema of a part of a value, with the definitions of the whole."""
    found = dict(schema) if isinstance(schema, Mapping) else {}
    return found | {name: root[name] for name in ("$defs", "definitions") if name in root}


def tag_of(begin: str, content: Tag, end: str) -> Tag:
    """A form between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def repeated(calls: Sequence[Tag], separator: str, *, is_one: bool) -> Tag:
    """One of these calls, or several with ``separator`` between."""
    call = calls[0] if len(calls) == 1 else {"type": "or", "elements": list(calls)}
    if is_one:
        return call
    following = sequence(const(separator), call) if separator else call
    more = {"type": "star", "content": following}
    return sequence(call, more)
