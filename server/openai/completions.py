"""Answers of ``/v1/completions``."""

from __future__ import annotations

from typing import Any

from trimaran.server.models.text_request import TextChunk
from trimaran.server.models.tokenizer import Tokenizer
from trimaran.server.openai.answers import (
    DONE,
    EventForm,
    ResponseMetadata,
    Usage,
    finish_reason,
)
from trimaran.server.openai.errors import ErrorFacts
from trimaran.server.openai.log_probs import completion_object, scored
from trimaran.server.openai.requests import GenerationRequest
from trimaran.server.protocol import json_access
from trimaran.server.protocol.json_access import Fragment


class CompletionAnswer:
    """See `Answer`."""

    closes_at_once = True

    def __init__(
        self,
        metadata: ResponseMetadata,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        usage: Usage,
    ) -> None:
        self._metadata = metadata
        self._request = request
        self._tokenizer = tokenizer
        self._usage = usage
        self._num_sequences = request.params.num_sequences
        self._forms: dict[int, EventForm] = {}
        self._offsets: dict[int, int] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._echoed: set[int] = set()

    def opening(self) -> list[bytes]:
        """See `Answer`."""
        return []

    def events(self, chunk: TextChunk) -> list[bytes]:
        """See `Answer`."""
        self._usage.add(chunk)
        index = self._index(chunk)
        text = self._echo(index, chunk) + chunk.text
        if not chunk.finish_reason and self._request.num_top is None:
            form = self._forms.get(index)
            if form is None:
                form = EventForm(self._event([self._choice(index, EventForm.TEXT)]))
                self._forms[index] = form
            return [form.event(text)]
        return [json_access.dump(self._event([self._whole_choice(index, text, chunk)]))]

    def closing(self) -> list[bytes]:
        """See `Answer`."""
        if not self._request.params.include_usage:
            return [DONE]
        last = self._event([])
        last["usage"] = self._usage.document()
        return [json_access.dump(last), DONE]

    def failure(self, error: ErrorFacts) -> list[bytes]:
        """See `Answer`."""
        return [error.document()]

    def add(self, chunk: TextChunk) -> None:
        """See `Answer`."""
        self._usage.add(chunk)
        index = self._index(chunk)
        text = self._echo(index, chunk) + chunk.text
        choice = self._whole_choice(index, text, chunk)
        if choice["logprobs"] is not None:
            # Several times smaller than the objects.
            choice["logprobs"] = Fragment(json_access.dump_in_parts(choice["logprobs"]))
        self._choices[index] = choice

    def document(self) -> dict[str, Any]:
        """See `Answer`."""
        found = self._event([self._choices[index] for index in sorted(self._choices)])
        found["usage"] = self._usage.document()
        return found

    def _index(self, chunk: TextChunk) -> int:
        return chunk.sample * self._num_sequences + chunk.sequence

    def _echo(self, index: int, chunk: TextChunk) -> str:
        """The prompt, before the first text of a choice."""
        if not self._request.echo or index in self._echoed:
            return ""
        self._echoed.add(index)
        return self._request.prompts[chunk.sample]

    def _whole_choice(self, index: int, text: str, chunk: TextChunk) -> dict[str, Any]:
        choice = self._choice(index, text)
        if chunk.finish_reason:
            choice["finish_reason"] = finish_reason(chunk)
        num_top = self._request.num_top
        if num_top is not None:
            offset = self._offsets.get(index, 0)
            tokens = scored(chunk, num_top)
            choice["logprobs"] = completion_object(self._tokenizer, tokens, num_top, offset)
            self._offsets[index] = offset + len(chunk.text)
        return choice

    @staticmethod
    def _choice(index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        metadata = self._metadata
        event = {
            "id": metadata.id,
            "object": "text_completion",
            "created": metadata.created_s,
            "model": metadata.model,
            "choices": choices,
        }
        if self._request.params.include_usage:
            event["usage"] = None
        return event
