"""What every answer has: an id, a time, usage, and the form of its events."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any, Protocol

from trimaran.server.models.text_request import TextChunk
from trimaran.server.openai.errors import ErrorFacts
from trimaran.server.protocol import json_access

DONE = b"[DONE]"
_CACHED_BLOCKS = "kv_cache_reused_blocks"


@dataclass(slots=True)
class ResponseMetadata:
    """The members that all parts of an answer share."""

    id: str
    model: str
    """The name that the client sent."""

    created_s: int
    service_tier: str | None = None

    @classmethod
    def new(cls, prefix: str, model: str, service_tier: str | None = None) -> ResponseMetadata:
        """A label of now."""
        return cls(f"{prefix}{os.urandom(16).hex()}", model, int(time.time()), service_tier)


class Answer(Protocol):
    """One request's answer, made of its chunks: a document or a stream of events."""

    @property
    def closes_at_once(self) -> bool:
        """Whether the closing events take little time."""
        ...

    def opening(self) -> list[bytes]:
        """The events before the first chunk."""
        ...

    def events(self, chunk: TextChunk) -> list[bytes]:
        """The events of a chunk. Called in order."""
        ...

    def closing(self) -> list[bytes]:
        """The events behind the last chunk."""
        ...

    def failure(self, error: ErrorFacts) -> list[bytes]:
        """The events of an error that ends a stream."""
        ...

    def add(self, chunk: TextChunk) -> None:
        """Take in the chunk of a whole sequence, for `document`."""
        ...

    def document(self) -> dict[str, Any]:
        """The answer as one object; with log-probabilities, for `dump_in_parts`."""
        ...


@dataclass(slots=True)
class Usage:
    """Tokens of a request: prompts count once, outputs of all sequences together."""

    tokens_per_block: int = 0
    """Block size of the engine's cache; 0: not known."""

    num_reasoning: int | None = None
    """Tokens of reasoning; None: outputs have none."""

    _inputs: dict[int, int] = field(default_factory=dict)
    _outputs: dict[tuple[int, int], int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)

    def add(self, chunk: TextChunk) -> None:
        """Take in the counts of a sequence so far."""
        self._inputs[chunk.sample] = chunk.num_input
        self._outputs[chunk.sample, chunk.sequence] = chunk.num_output
        blocks = chunk.figures.get(_CACHED_BLOCKS)
        if blocks is not None:
            cached = min(blocks * self.tokens_per_block, chunk.num_input)
            # The other sequences of a prompt find what the first one left.
            self._cached[chunk.sample] = min(cached, self._cached.get(chunk.sample, cached))

    @property
    def num_input(self) -> int:
        """Tokens of all prompts."""
        return sum(self._inputs.values())

    @property
    def num_output(self) -> int:
        """Tokens of all sequences."""
        return sum(self._outputs.values())

    @property
    def num_cached(self) -> int:
        """Tokens of the prompts that were not computed anew."""
        return sum(self._cached.values())

    def document(self) -> dict[str, Any]:
        """The object ``usage``."""
        document: dict[str, Any] = {
            "prompt_tokens": self.num_input,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_input + self.num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }
        if self.num_reasoning is not None:
            details = {"reasoning_tokens": self.num_reasoning}
            document["completion_tokens_details"] = details
        return document


def json_text(text: str) -> bytes:
    """A text as JSON; surrogates become the bytes that they escaped. The JSON encoder takes
    ten times as long."""
    quoted: str = encode_basestring(text)
    return quoted.encode("utf-8", "surrogateescape")


class EventForm:
    """Events that differ in one text: the bytes around the text are made once."""

    TEXT = "\x00text\x00"

    def __init__(self, make: Mapping[str, Any]) -> None:
        """``make`` is an event with `EventForm.TEXT` in the place of the text."""
        whole = json_access.dump(make)
        self._head, self._tail = whole.split(json_access.dump(self.TEXT))

    def event(self, text: str) -> bytes:
        """The event with a text."""
        return b"".join((self._head, json_text(text), self._tail))


def finish_reason(chunk: TextChunk) -> str:
    """OpenAI's word for the end of a sequence."""
    # A request that an operator stopped has ended early, like a request at a stop word.
    return "length" if chunk.finish_reason == "length" else "stop"
