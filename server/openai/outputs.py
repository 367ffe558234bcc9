"""One sequence of a chat: its text, its reasoning and its tool calls as they come."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trimaran.server.models.text_request import TextChunk
from trimaran.server.models.tokenizer import Tokenizer
from trimaran.server.openai.log_probs import ScoredToken, scored
from trimaran.server.openai.parsing.output_parser import OutputParser
from trimaran.server.openai.parsing.reasoning_formats import REASONING_FORMATS
from trimaran.server.openai.parsing.scanner import Kind, Segment
from trimaran.server.openai.parsing.tool_formats import literals_of
from trimaran.server.openai.tools import ParserOptions

_ID_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_ID_LENGTHS = {"mistral": 9}
"""Mistral's chat templates take ids of exactly this length."""

_LENGTH = 24
_SLACK = 8
"""Characters that may come before a token's text: those of tokens that write parts of one."""


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


@dataclass(slots=True)
class Part:
    """A new part of an output."""

    segment: Segment
    number: int
    """That of the last call."""

    tokens: list[ScoredToken]
    """The tokens that wrote a text, where log-probabilities are asked for."""


class Output:
    """Cuts a sequence's text, and keeps what was found."""

    def __init__(
        self, options: ParserOptions, tokenizer: Tokenizer, num_top: int | None = None
    ) -> None:
        """``num_top``: likeliest tokens of each token of a text; None: no log-probabilities."""
        self._parser_options = options
        self._tokenizer = tokenizer
        self._dropped = foreign_tokens(options, tokenizer)
        self._parser: OutputParser = options.parser()
        self._num_top = num_top
        self._by_token = bool(options.reasoning) or num_top is not None
        self._waiting: list[ScoredToken] = []
        """Tokens behind the last segment."""

        self._text: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[Call] = []
        self._num_seen = 0
        self.num_reasoning = 0
        """Tokens of the reasoning so far, without those of its closing."""

    @property
    def text(self) -> str:
        """The text so far, in time proportional to its length."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The reasoning so far; as for `text`."""
        return "".join(self._reasoning)

    def feed(self, chunk: TextChunk) -> list[Part]:
        """The new parts."""
        text, ids = chunk.text, chunk.token_ids
        if self._dropped is not None:
            text = self._dropped.sub("", text)
        is_last = bool(chunk.finish_reason)
        if not self._by_token:
            segments = self._parser.feed(text)
            if is_last:
                segments += self._parser.finish()
            return [
                Part(each, len(self.calls) - 1, []) for each in segments if self._take(each)
            ]
        parts: list[Part] = []
        tokens = [] if self._num_top is None else scored(chunk, self._num_top)
        for number, piece in enumerate(cut_by_tokens(self._tokenizer, ids, text)):
            segments = self._parser.feed(piece)
            self.num_reasoning += number < len(ids) and self._parser.is_reasoning
            self._waiting += tokens[number : number + 1]
            self._add(parts, segments)
        if is_last:
            self._add(parts, self._parser.finish())
        return parts

    def _add(self, parts: list[Part], segments: list[Segment]) -> None:
        """Add segments, the text of one kind in a row joined, with the tokens behind the last
        segment."""
        for segment in segments:
            if not self._take(segment):
                continue
            waiting, self._waiting = self._waiting, []
            tokens = self._last_of(waiting, segment.text) if waiting else []
            last = parts[-1] if parts else None
            is_more = last is not None and segment.kind is not Kind.CALL
            if last is not None and is_more and last.segment.kind is segment.kind:
                last.segment.text += segment.text
                last.tokens += tokens
            else:
                parts.append(Part(segment, len(self.calls) - 1, tokens))

    def _last_of(self, tokens: list[ScoredToken], text: str) -> list[ScoredToken]:
        """The last of these tokens, as many as write the text: literals come before a text."""
        left = len(text.encode("utf-8", "surrogatepass"))
        place = len(tokens)
        while place and left > 0:
            place -= 1
            left -= len(self._tokenizer.token_bytes(tokens[place].token_id))
        return tokens[place:]

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


def cut_by_tokens(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[str]:
    """The pieces of a text that its tokens wrote, at least one. A token whose text is hidden,
    or waits for the rest of a character, has an empty piece."""
    if len(ids) < 2:
        return [text]
    pieces, place = [], 0
    for token_id in ids:
        word = tokenizer.token_text(token_id)
        found = text.find(word, place, place + len(word) + _SLACK) if word else -1
        if found < 0 and place == 0 and word.startswith(" ") and text.startswith(word[1:]):
            # The space before a text's first word is no part of the text.
            found, word = 0, word[1:]
        end = place if found < 0 else found + len(word)
        pieces.append(text[place:end])
        place = end
    pieces[-1] += text[place:]
    return pieces


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
