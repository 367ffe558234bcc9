"""Tool calls as Kimi K3 writes them: elements whose marks are special tokens.

An element is ``<|open|>NAME ATTRIBUTES<|sep|>...<|close|>NAME<|sep|>``. Attributes escape ``&``
and ``"``; the contents of elements are written as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimaran.server.openai.parsing.argument_types import ArgumentType, type_of
from trimaran.server.openai.parsing.output_parser import ToolParser
from trimaran.server.openai.parsing.scanner import MalformedError, Scanner, Steps
from trimaran.server.openai.parsing.structural_tags import (
    Pieces,
    Schema,
    Tag,
    json_schema,
    optional,
    repeated,
    sequence,
    within,
)
from trimaran.server.openai.parsing.tagged_calls import Call

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_TEXT = ArgumentType(frozenset(("string",)))
_NUMBER: Tag = {"type": "regex", "pattern": "[0-9]{1,3}"}


def _begin(name: str) -> str:
    return f"{_OPEN}{name}{_SEP}"


def _end(name: str) -> str:
    return f"{_CLOSE}{name}{_SEP}"


@dataclass(frozen=True, slots=True)
class KimiK3ToolParser(ToolParser):
    """Calls with arguments as elements, whose attribute ``type`` says whether the content is a
    text or JSON."""

    @property
    def openings(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (_begin("tools"),)

    @property
    def ends_reasoning(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return self.openings

    @property
    def frames(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (_begin("response"), _end("response"), _end("message"))

    def read(self, scanner: Scanner, opening: str) -> Steps:
        """See `ToolParser`."""
        num_calls = 0
        while True:
            yield from scanner.space()
            read = yield from scanner.take(f"{_OPEN}call ")
            if not read:
                break
            yield from self._call(scanner)
            num_calls += 1
        if not num_calls:
            raise MalformedError
        yield from scanner.take(_end("tools"))

    def _call(self, scanner: Scanner) -> Steps:
        head = yield from scanner.until((_SEP,))
        name = _attributes(head).get("tool", "")
        if not name:
            raise MalformedError
        call = Call(scanner, name)
        while True:
            yield from scanner.space()
            read = yield from scanner.take(f"{_OPEN}argument ", _end("call"))
            if read == _end("call"):
                call.close()
                return
            if not read:
                raise MalformedError
            head = yield from scanner.until((_SEP,))
            given = _attributes(head)
            call.begin_value(given.get("key", ""))
            is_text = given.get("type", "string") == "string"
            yield from call.value(_TEXT if is_text else None, (_end("argument"),))

    def structure(self, tools: Mapping[str, Schema], pieces: Pieces, *, is_one: bool) -> Tag:
        """The structural tag of calls."""
        calls = [
            sequence(
                *pieces.text(f'{_OPEN}call tool="{_escaped(name)}" index="'),
                _NUMBER,
                *pieces.text(f'"{_SEP}'),
                *self._arguments(schema, pieces),
                *pieces.text(_end("call")),
            )
            for name, schema in tools.items()
        ]
        section = repeated(calls, "", is_one=is_one)
        begin, end = pieces.text(_begin("tools")), pieces.text(_end("tools"))
        return sequence(*begin, section, *end)

    def _arguments(self, schema: Schema, pieces: Pieces) -> list[Tag]:
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        found = []
        for key, each in properties.items():
            tag = self._argument(key, each, schema, pieces)
            found.append(tag if key in required else optional(tag))
        return found

    def _argument(self, key: str, schema: Any, root: Schema, pieces: Pieces) -> Tag:
        """A text as it is where the schema allows any text, and JSON of any other value."""
        kind = type_of(schema, root)
        is_text = kind is not None and kind.is_any_text and is_plain(schema)
        kinds = sorted(kind.kinds) if kind is not None else []
        named = "string" if is_text else _NAMES.get(kinds[0] if kinds else "", "object")
        content: Tag = {"type": "any_text", "excludes": [_OPEN, _CLOSE, _SEP]}
        return sequence(
            *pieces.text(f'{_OPEN}argument key="{_escaped(key)}" type="{named}"{_SEP}'),
            content if is_text else json_schema(within(schema, root)),
            *pieces.text(_end("argument")),
        )


_NAMES = {"array": "array", "boolean": "boolean", "integer": "number", "null": "null",
          "number": "number", "object": "object"}  # fmt: skip
"""The names of types in the form. A text that a schema restricts is JSON of another name."""


def is_plain(schema: Any) -> bool:
    """Whether a schema restricts a text no further."""
    return isinstance(schema, Mapping) and not any(name in schema for name in _RESTRICTIONS)


_RESTRICTIONS = ("pattern", "format", "minLength", "maxLength", "enum", "const", "$ref",
                 "anyOf", "oneOf", "allOf")  # fmt: skip


def _attributes(text: str) -> dict[str, str]:
    return {
        name: value.replace("&quot;", '"').replace("&amp;", "&")
        for name, value in _ATTRIBUTE.findall(text)
    }


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")
