"""The forms in which families of models write tool calls.

One entry of the table reads a form, and makes the structural tag by which guided decoding
allows nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimaran.server.openai.parsing.harmony import HarmonyToolParser
from trimaran.server.openai.parsing.output_parser import ToolParser
from trimaran.server.openai.parsing.pythonic_calls import PythonicToolParser
from trimaran.server.openai.parsing.scanner import MalformedError, Scanner, Steps
from trimaran.server.openai.parsing.structural_tags import (
    Pieces,
    Schema,
    Tag,
    const,
    json_schema,
    repeated,
    sequence,
    tag_of,
)

_ANY_OBJECT: Schema = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class JsonCall:
    """``{"name": ..., ARGUMENTS: {...}}``."""

    arguments_name: str = "arguments"
    others: tuple[str, ...] = ("arguments", "parameters")
    """Names of the arguments that are read as well."""

    must_be_known: bool = False
    """Whether the name of no tool makes the object a text."""

    def read(self, scanner: Scanner) -> Steps:
        """Read one object. The first name and the first arguments count.

        Raises:
            MalformedError: no such object.
        """
        yield from scanner.space()
        yield from scanner.expect("{")
        name, before, has_arguments = "", [""], False
        while True:
            first = yield from scanner.space()
            if first == "}":
                break
            yield from scanner.expect('"')
            key = yield from scanner.json_text()
            yield from scanner.space()
            yield from scanner.expect(":")
            yield from scanner.space()
            if key == "name" and not name:
                yield from scanner.expect('"')
                name = yield from scanner.json_text()
                self._begin(scanner, name)
                scanner.arguments(before[0])
            elif key in self.others and not has_arguments:
                has_arguments = True
                yield from self._arguments(scanner, before, is_known=bool(name))
            else:
                yield from scanner.json_value(lambda _: None)
            following = yield from scanner.space()
            if following == ",":
                yield from scanner.expect(",")
        yield from scanner.expect("}")
        if not name:
            raise MalformedError
        if not has_arguments:
            scanner.arguments("{}")

    def _begin(self, scanner: Scanner, name: str) -> None:
        if not name or (self.must_be_known and name not in scanner.tools):
            raise MalformedError
        scanner.call(name)

    def _arguments(self, scanner: Scanner, before: list[str], *, is_known: bool) -> Steps:
        """Pass the arguments on, or keep them until the name is known."""

        def keep(text: str) -> None:
            before[0] += text

        first = yield from scanner.space()
        emit = scanner.arguments if is_known else keep
        if first == "{":
            yield from scanner.json_value(emit)
            return
        parts: list[str] = []
        yield from scanner.json_value(parts.append)
        emit(_as_object("".join(parts)))

    def tag(self, name: str, schema: Schema) -> Tag:
        """The call of one tool."""
        begin = f'{{"name": {json.dumps(name)}, "{self.arguments_name}": '
        return tag_of(begin, json_schema(schema), "}")


def _as_object(text: str) -> str:
    """Arguments that are a JSON text within a string, or nothing."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise MalformedError from None
    if value is None:
        return "{}"
    return value if isinstance(value, str) else text


@dataclass(frozen=True, slots=True)
class HermesToolParser(ToolParser):
    """A JSON object between two literals."""

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"
    call: JsonCall = field(default_factory=JsonCall)

    @property
    def openings(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (self.opening,)

    def read(self, scanner: Scanner, opening: str) -> Steps:
        """See `ToolParser`."""
        yield from self.call.read(scanner)
        yield from scanner.space()
        yield from scanner.take(self.closing)

    def structure(self, tools: Mapping[str, Schema], pieces: Pieces, *, is_one: bool) -> Tag:
        """The structural tag of calls."""
        tags = []
        for name, schema in tools.items():
            tag = self.call.tag(name, schema)
            begin = [*pieces.text(self.opening + "\n"), const(tag["begin"])]
            end = [const(tag["end"]), *pieces.text("\n" + self.closing)]
            tags.append(sequence(*begin, tag["content"], *end))
        return repeated(tags, "\n", is_one=is_one)


@dataclass(frozen=True, slots=True)
class LlamaToolParser(ToolParser):
    """The whole output is JSON objects with semicolons between."""

    call: JsonCall = field(
        default_factory=lambda: JsonCall(arguments_name="parameters", must_be_known=True)
    )

    @property
    def openings(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return ("<|python_tag|>",)

    @property
    def is_at_start(self) -> bool:
        """See `ToolParser`."""
        return True

    def read(self, scanner: Scanner, opening: str) -> Steps:
        """See `ToolParser`."""
        if not opening:
            yield from scanner.space()
            yield from scanner.take(*self.openings)
        while True:
            yield from self.call.read(scanner)
            following = yield from scanner.space()
            if following not in (";", ","):
                return
            yield from scanner.expect(following)

    def structure(self, tools: Mapping[str, Schema], pieces: Pieces, *, is_one: bool) -> Tag:
        """The structural tag of calls."""
        tags = [self.call.tag(name, schema) for name, schema in tools.items()]
        return repeated(tags, "; ", is_one=is_one)


@dataclass(frozen=True, slots=True)
class MistralToolParser(ToolParser):
    """A literal, then a list of JSON objects, or a name and its arguments."""

    opening: str = "[TOOL_CALLS]"
    call: JsonCall = field(default_factory=JsonCall)

    @property
    def openings(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (self.opening,)

    def read(self, scanner: Scanner, opening: str) -> Steps:
        """See `ToolParser`."""
        first = yield from scanner.space()
        if first not in ("[", "{"):
            yield from self._named(scanner)
            return
        yield from scanner.take("[")
        while True:
            yield from self.call.read(scanner)
            following = yield from scanner.space()
            if following != ",":
                yield from scanner.take("]")
                return
            yield from scanner.expect(",")

    def _named(self, scanner: Scanner) -> Steps:
        """``NAME[ARGS]{...}`` or ``NAME{...}``."""
        name = ""
        while True:
            found = yield from scanner.char()
            if not (found.isalnum() or (found and found in "_-./")):
                scanner.push(found)
                break
            name += found
        yield from scanner.take("[ARGS]")
        first = yield from scanner.space()
        if not name or first != "{":
            raise MalformedError
        scanner.call(name)
        yield from scanner.json_value(scanner.arguments)

    def structure(self, tools: Mapping[str, Schema], pieces: Pieces, *, is_one: bool) -> Tag:
        """The structural tag of calls."""
        tags = [self.call.tag(name, schema) for name, schema in tools.items()]
        calls = repeated(tags, ", ", is_one=is_one)
        return sequence(*pieces.text(self.opening), const("["), calls, const("]"))


@dataclass(frozen=True, slots=True)
class DeepSeekToolParser(ToolParser):
    """Names and JSON arguments between literals."""

    before_name: str = ""
    before_arguments: str = "<｜tool▁sep｜>"
    after_arguments: str = ""
    begins: str = "<｜tool▁calls▁begin｜>"
    ends: str = "<｜tool▁calls▁end｜>"
    begin: str = "<｜tool▁call▁begin｜>"
    end: str = "<｜tool▁call▁end｜>"

    @property
    def openings(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (self.begins,)

    def read(self, scanner: Scanner, opening: str) -> Steps:
        """See `ToolParser`."""
        while True:
            yield from scanner.space()
            yield from scanner.expect(self.begin + self.before_name)
            name = yield from scanner.until((self.before_arguments,))
            if not name.strip():
                raise MalformedError
            scanner.call(name.strip())
            yield from scanner.json_value(scanner.arguments)
            yield from scanner.space()
            yield from scanner.expect(self.after_arguments.lstrip() + self.end)
            following = yield from scanner.space()
            if following != self.begin[0]:
                return
            read = yield from scanner.take(self.ends)
            if read:
                return

    def structure(self, tools: Mapping[str, Schema], pieces: Pieces, *, is_one: bool) -> Tag:
        """The structural tag of calls."""
        calls = [
            sequence(
                *pieces.text(f"{self.begin}{self.before_name}{name}{self.before_arguments}"),
                json_schema(schema),
                *pieces.text(f"{self.after_arguments}{self.end}"),
            )
            for name, schema in tools.items()
        ]
        calls_tag = repeated(calls, "\n", is_one=is_one)
        return sequence(*pieces.text(self.begins), calls_tag, *pieces.text(self.ends))


_VALUE_ENDS = ("\n</parameter>", "</parameter>")


@dataclass(frozen=True, slots=True)
class XmlToolParser(ToolParser):
    """Functions and parameters as tags, whose values are texts or JSON by their schema."""

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"

    @property
    def openings(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (self.opening,)

    def read(self, scanner: Scanner, opening: str) -> Steps:
        """See `ToolParser`."""
        yield from scanner.space()
        yield from scanner.expect("<function=")
        name = yield from scanner.until((">",))
        if not name:
            raise MalformedError
        scanner.call(name)
        scanner.arguments("{")
        schema = scanner.tools.get(name, _ANY_OBJECT).get("properties") or {}
        num_values = 0
        while True:
            yield from scanner.space()
            read = yield from scanner.take("<parameter=")
            if not read:
                break
            key = yield from scanner.until((">",))
            separator = ", " if num_values else ""
            scanner.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._value(scanner, schema.get(key))
            num_values += 1
        scanner.arguments("}")
        yield from scanner.take("</function>")
        yield from scanner.space()
        yield from scanner.take(self.closing)

    def _value(self, scanner: Scanner, schema: Any) -> Steps:
        first = yield from scanner.char()
        if first != "\n":
            scanner.push(first)
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            scanner.arguments('"')
            yield from scanner.until(_VALUE_ENDS, lambda c: scanner.arguments(_escaped(c)))
            scanner.arguments('"')
            return
        parts: list[str] = []
        yield from scanner.until(_VALUE_ENDS, parts.append)
        scanner.arguments(_json_of("".join(parts)))

    def structure(self, tools: Mapping[str, Schema], pieces: Pieces, *, is_one: bool) -> Tag:
        """The structural tag of calls."""
        calls = [
            sequence(
                *pieces.text(f"{self.opening}\n<function={name}>\n"),
                {**json_schema(schema), "style": "qwen_xml"},
                *pieces.text(f"\n</function>\n{self.closing}"),
            )
            for name, schema in tools.items()
        ]
        return repeated(calls, "\n", is_one=is_one)


def _escaped(character: str) -> str:
    return json.dumps(character, ensure_ascii=False)[1:-1]


def _json_of(text: str) -> str:
    """A value that is JSON, or else a text, as JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps({"True": True, "False": False, "None": None}.get(text, text),
                          ensure_ascii=False)  # fmt: skip
    return text.strip()


ToolFormat = (
    HermesToolParser | LlamaToolParser | MistralToolParser | DeepSeekToolParser | XmlToolParser
    | PythonicToolParser | HarmonyToolParser
)  # fmt: skip

FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HermesToolParser(),
    "llama3": LlamaToolParser(),
    "mistral": MistralToolParser(),
    "pythonic": PythonicToolParser(),
    "qwen3_coder": XmlToolParser(),
    "deepseek_v3": DeepSeekToolParser(
        before_name="function<｜tool▁sep｜>",
        before_arguments="\n```json\n",
        after_arguments="\n```",
    ),
    "deepseek_v31": DeepSeekToolParser(),
    "harmony": HarmonyToolParser(),
}
"""By the names that vLLM and Triton's OpenAI front end use."""


def literals_of(name: str) -> str:
    """A text that holds every literal of a form."""
    form = FORMATS[name]
    tag = form.structure({"name": {"type": "object"}}, Pieces(), is_one=False)
    return form.literals + json.dumps(tag, ensure_ascii=False)


_MARKS = (
    ("<|channel|>", "harmony"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("```json", "deepseek_v3"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
    ("<|python_tag|>", "llama3"),
    ("[func_name1(", "pythonic"),
    ('"parameters":', "llama3"),
)
"""Texts of chat templates, and the form that a template with this text asks for; the first
counts."""


def format_of_template(text: str) -> str:
    """The name of the form that a chat template asks for; empty if the template tells none."""
    if "tools" not in text:
        return ""
    for mark, name in _MARKS:
        if mark in text and (mark != "```json" or "<｜tool▁calls▁begin｜>" in text):
            return name
    return ""
