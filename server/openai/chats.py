"""Answers of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from trimaran.server.models.text_job import TextChunk
from trimaran.server.models.tokenizer import Tokenizer
from trimaran.server.openai.answers import DONE, EventForm, Label, Usage, finish_reason
from trimaran.server.openai.log_probs import chat_content, scored
from trimaran.server.openai.requests import GenerationRequest
from trimaran.server.protocol import json_access


class ChatAnswer:
    """See `Answer`."""

    def __init__(
        self, label: Label, request: GenerationRequest, tokenizer: Tokenizer, usage: Usage
    ) -> None:
        self._label = label
        self._request = request
        self._tokenizer = tokenizer
        self._usage = usage
        self._forms: dict[int, EventForm] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def opening(self) -> list[bytes]:
        """See `Answer`."""
        first = {"role": "assistant", "content": ""}
        return [
            json_access.dump(self._event([self._choice(index, first)]))
            for index in range(self._request.asked.num_sequences)
        ]

    def events(self, chunk: TextChunk) -> list[bytes]:
        """See `Answer`."""
        self._usage.add(chunk)
        if not chunk.finish_reason and self._request.num_top is None:
            form = self._forms.get(chunk.sequence)
            if form is None:
                delta = {"content": EventForm.TEXT}
                form = EventForm(self._event([self._choice(chunk.sequence, delta)]))
                self._forms[chunk.sequence] = form
            return [form.event(chunk.text)]
        choice = self._choice(chunk.sequence, {"content": chunk.text} if chunk.text else {})
        self._complete(choice, chunk)
        return [json_access.dump(self._event([choice]))]

    def closing(self) -> list[bytes]:
        """See `Answer`."""
        if not self._request.asked.include_usage:
            return [DONE]
        last = self._event([])
        last["usage"] = self._usage.document()
        return [json_access.dump(last), DONE]

    def add(self, chunk: TextChunk) -> None:
        """See `Answer`."""
        self._usage.add(chunk)
        message = {"role": "assistant", "content": chunk.text, "refusal": None}
        choice: dict[str, Any] = {
            "index": chunk.sequence, "message": message, "logprobs": None,
            "finish_reason": None,
        }  # fmt: skip
        self._complete(choice, chunk)
        self._choices[chunk.sequence] = choice

    def document(self) -> dict[str, Any]:
        """See `Answer`."""
        found = self._event([self._choices[index] for index in sorted(self._choices)])
        found["object"] = "chat.completion"
        found["usage"] = self._usage.document()
        return found

    def _complete(self, choice: dict[str, Any], chunk: TextChunk) -> None:
        if chunk.finish_reason:
            choice["finish_reason"] = finish_reason(chunk)
        if self._request.num_top is not None:
            tokens = scored(chunk, self._request.num_top)
            content = chat_content(self._tokenizer, tokens)
            choice["logprobs"] = {"content": content, "refusal": None}

    @staticmethod
    def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        label = self._label
        event: dict[str, Any] = {
            "id": label.id,
            "object": "chat.completion.chunk",
            "created": label.created_s,
            "model": label.model,
            "choices": choices,
        }
        if label.service_tier is not None:
            event["service_tier"] = label.service_tier
        if self._request.asked.include_usage:
            event["usage"] = None
        return event
