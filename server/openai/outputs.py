"""One sequence of a chat: its text, its reasoning and its tool calls as they come."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import Any

from trimaran.server.models.tokenizer import Tokenizer
from trimaran.server.openai.parsing.output_parser import OutputParser
from trimaran.server.openai.parsing.reasoning_formats import REASONING_FORMATS
from trimaran.server.openai.parsing.scanner import Kind, Segment
from trimaran.server.openai.parsing.tool_formats import literals_of
from trimaran.server.openai.tools import ParserOptions

_ID_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_ID_LENGTHS = {"mistral": 9}
"""Mistral's chat templates take ids of exactly this length."""

_LENGTH = 24


@dataclass(slots=True)
class Call:
    """A tool call, or its beginning."""

    id: str
    name: str
    parts: list[str] = field(default_factory=list)
    """Parts of the arguments. One growing text would be copied for each part."""

    @property
    def arguments(self) -> str:
        """The JSON text so far."""
        return "".join(self.parts)

    def document(self) -> dict[str, Any]:
        """The member of ``tool_calls``."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Output:
    """Cuts a sequence's text, and keeps what was found."""

    def __init__(self, options: ParserOptions, dropped: re.Pattern[str] | None) -> None:
        """``dropped`` matches special tokens that are no part of the output's form."""
        self._parser_options = options
        self._dropped = dropped
        self._parser: OutputParser = options.parser()
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[Call] = []
        self._num_seen = 0

    @property
    def text(self) -> str:
        """The text so far, in time proportional to its length."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The reasoning so far; as for `text`."""
        return "".join(self._reasoning)

    def feed(self, text: str, *, is_last: bool) -> list[tuple[Segment, int]]:
        """The new segments, each with the number of its call."""
        if self._dropped is not None:
            text = self._dropped.sub("", text)
        segments = self._parser.feed(text)
        if is_last:
            segments += self._parser.finish()
        return [(segment, len(self.calls) - 1) for segment in segments if self._take(segment)]

    def _take(self, segment: Segment) -> bool:
        """Keep a segment; False for a segment of a call beyond the limit."""
        most = self._parser_options.max_calls
        if segment.kind is Kind.TEXT:
            self._text.append(segment.text)
        elif segment.kind is Kind.REASONING:
            self._reasoning.append(segment.text)
        elif segment.kind is Kind.CALL:
            self._num_seen += 1
            if most is not None and self._num_seen > most:
                return False
            self.calls.append(Call(segment.call_id or self._new_id(), segment.text))
        else:
            if most is not None and self._num_seen > most:
                return False
            self.calls[-1].parts.append(segment.text)
        return True

    def _new_id(self) -> str:
        length = _ID_LENGTHS.get(self._parser_options.tool_format)
        letters = "".join(secrets.choice(_ID_LETTERS) for _ in range(length or _LENGTH))
        return letters if length else f"call_{letters}"


def delta_of(segment: Segment, number: int, output: Output) -> dict[str, Any]:
    """The object ``delta`` of a chat's event."""
    if segment.kind is Kind.TEXT:
        return {"content": segment.text}
    if segment.kind is Kind.REASONING:
        return {"reasoning_content": segment.text}
    if segment.kind is Kind.CALL:
        call = output.calls[number]
        function = {"name": call.name, "arguments": ""}
        begun = {"index": number, "id": call.id, "type": "function", "function": function}
        return {"tool_calls": [begun]}
    return {"tool_calls": [{"index": number, "function": {"arguments": segment.text}}]}


def foreign_tokens(options: ParserOptions, tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Matches special tokens that are no part of the output's form; None if none are shown."""
    if not options.shows_special_tokens:
        return None
    literals = literals_of(options.tool_format) if options.tool_format else ""
    if options.reasoning:
        reasoning = REASONING_FORMATS[options.reasoning]
        literals += reasoning.opening + reasoning.closing
    tokens = [token for token in tokenizer.special_texts if token not in literals]
    return re.compile("|".join(map(re.escape, tokens))) if tokens else None
