"""Tool calls as MiniMax M3 writes them: elements within elements, each behind one mark.

Members of objects are elements of their names, items of lists elements ``item``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimaran.server.openai.parsing.argument_types import (
    ArgumentType,
    member_schema,
    type_of,
)
from trimaran.server.openai.parsing.kimi_calls import is_plain
from trimaran.server.openai.parsing.output_parser import ToolParser
from trimaran.server.openai.parsing.scanner import MalformedError, Reader, Scanner, Steps
from trimaran.server.openai.parsing.structural_tags import (
    Pieces,
    Schema,
    Tag,
    const,
    json_schema,
    optional,
    repeated,
    sequence,
    within,
)
from trimaran.server.openai.parsing.tagged_calls import escaped

_MARK = "]<]minimax[>["
_ITEM = "item"
_KEY = re.compile(r"[^<>\s]{1,256}")
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class MinimaxM3ToolParser(ToolParser):
    """Functions and their arguments as elements."""

    @property
    def openings(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (f"{_MARK}<tool_call>",)

    @property
    def ends_reasoning(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return self.openings

    def read(self, scanner: Scanner, opening: str) -> Steps:
        """See `ToolParser`."""
        num_calls = 0
        while True:
            yield from scanner.space()
            yield from scanner.expect(_MARK)
            yield from scanner.space()
            read = yield from scanner.take('<invoke name="', "</tool_call>")
            if not read or (read == "</tool_call>" and not num_calls):
                raise MalformedError
            if read == "</tool_call>":
                return
            name = yield from scanner.until(('">',))
            if not name.strip():
                raise MalformedError
            scanner.call(name.strip())
            num_calls += 1
            root = scanner.tools.get(name.strip(), {})
            yield from _Arguments(scanner, root).members("invoke", root, 0)

    def structure(self, tools: Mapping[str, Schema], pieces: Pieces, *, is_one: bool) -> Tag:
        """The structural tag of calls."""
        calls = [
            sequence(
                *pieces.text(f'{_MARK}<invoke name="{name}">'),
                *_members(schema, schema, pieces, 0),
                *pieces.text(f"{_MARK}</invoke>\n"),
            )
            for name, schema in tools.items()
        ]
        section = repeated(calls, "", is_one=is_one)
        begin = pieces.text(f"{_MARK}<tool_call>\n")
        return sequence(*begin, section, *pieces.text(f"{_MARK}</tool_call>"))


class _Arguments:
    """The elements of one call, written as JSON as they are read."""

    def __init__(self, scanner: Scanner, root: Schema) -> None:
        self._scanner = scanner
        self._root = root

    def members(self, name: str, schema: Any, depth: int) -> Steps:
        """The members of an object up to its end.

        Raises:
            MalformedError: other text comes, or the output ends.
        """
        self._scanner.arguments("{")
        yield from self._children(name, schema, depth, first="", is_list=False)
        self._scanner.arguments("}")

    def _children(
        self, name: str, schema: Any, depth: int, *, first: str, is_list: bool
    ) -> Steps:
        """Elements up to the end of the element ``name``; ``first`` is the name of an element
        whose beginning was read."""
        if depth > _MAX_DEPTH:
            raise MalformedError
        separator, key = "", first
        while True:
            if not key:
                key = yield from self._tag(name)
                if not key:
                    return
            label = "" if is_list else f"{json.dumps(key, ensure_ascii=False)}: "
            self._scanner.arguments(separator + label)
            separator = ", "
            yield from self._value(key, member_schema(schema, self._root, key), depth + 1)
            key = ""

    def _tag(self, name: str) -> Reader:
        """The name of the element that begins; empty at the end of the element ``name``."""
        scanner = self._scanner
        yield from scanner.space()
        yield from scanner.expect(_MARK)
        yield from scanner.space()
        read = yield from scanner.take(f"</{name}>")
        if read:
            return ""
        key = yield from self._key()
        return key

    def _key(self) -> Reader:
        scanner = self._scanner
        yield from scanner.expect("<")
        key = yield from scanner.chars(_KEY)
        yield from scanner.space()
        yield from scanner.expect(">")
        if not key or key.startswith("/"):
            raise MalformedError
        return key

    def _value(self, name: str, schema: Any, depth: int) -> Steps:
        scanner, kind = self._scanner, type_of(schema, self._root)
        end = f"{_MARK}</{name}>"
        if kind is not None and kind.is_any_text:
            scanner.arguments('"')
            read = yield from scanner.until((end,), lambda c: scanner.arguments(escaped(c)))
            if not read:
                raise MalformedError
            scanner.arguments('"')
            return
        text = yield from scanner.until((_MARK,))
        yield from scanner.space()
        read = yield from scanner.take(f"</{name}>")
        if read:
            scanner.arguments(_leaf(text, kind))
            return
        key = yield from self._key()
        is_list = key == _ITEM and (kind is None or "object" not in kind.kinds)
        scanner.arguments("[" if is_list else "{")
        yield from self._children(name, schema, depth, first=key, is_list=is_list)
        scanner.arguments("]" if is_list else "}")


def _leaf(text: str, kind: ArgumentType | None) -> str:
    """The JSON of an element without elements."""
    if kind is not None and not text.strip() and "string" not in kind.kinds:
        for name, empty in (("object", "{}"), ("array", "[]"), ("null", "null")):
            if name in kind.kinds:
                return empty
    return (kind or ArgumentType()).json_of(text)


def _members(schema: Any, root: Schema, pieces: Pieces, depth: int) -> list[Tag]:
    properties = schema.get("properties") or {}
    required = schema.get("required") or ()
    found = []
    for key, each in properties.items():
        tag = _element(key, each, root, pieces, depth + 1)
        found.append(tag if key in required else optional(tag))
    return found


def _element(key: str, schema: Any, root: Schema, pieces: Pieces, depth: int) -> Tag:
    begin, end = pieces.text(f"{_MARK}<{key}>"), pieces.text(f"{_MARK}</{key}>")
    return sequence(*begin, *_content(schema, root, pieces, depth), *end)


def _content(schema: Any, root: Schema, pieces: Pieces, depth: int) -> list[Tag]:
    """The content of an element; JSON, which is read as well, where the schema is too rich."""
    kind = type_of(schema, root)
    if kind is not None and kind.kinds == {"string"}:
        if kind.choices:
            return [{"type": "or", "elements": [const(text) for text in kind.choices]}]
        return [{"type": "any_text", "excludes": [_MARK]}]
    if is_plain(schema) and depth < _MAX_DEPTH:
        if schema.get("type") == "object" and schema.get("properties"):
            return _members(schema, root, pieces, depth)
        if schema.get("type") == "array" and isinstance(schema.get("items"), Mapping):
            item = _element(_ITEM, schema["items"], root, pieces, depth + 1)
            return [{"type": "star", "content": item}]
    return [json_schema(within(schema, root))]
