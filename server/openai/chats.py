"""Answers of ``/v1/chat/completions``."""

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
from trimaran.server.openai.log_probs import chat_content, chat_fragment, scored
from trimaran.server.openai.outputs import Output, delta_of
from trimaran.server.openai.requests import GenerationRequest
from trimaran.server.openai.tools import ParserOptions
from trimaran.server.protocol import json_access


class ChatAnswer:
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
        self._parser_options = request.parser_options
        self._outputs: dict[int, Output] = {}
        self._forms: dict[int, EventForm] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def opening(self) -> list[bytes]:
        """See `Answer`."""
        first = {"role": "assistant", "content": ""}
        return [
            json_access.dump(self._event([self._choice(index, first)]))
            for index in range(self._request.params.num_sequences)
        ]

    def events(self, chunk: TextChunk) -> list[bytes]:
        """See `Answer`."""
        self._usage.add(chunk)
        if self._parser_options is not None:
            return self._parsed_events(chunk, self._parser_options)
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
        if not self._request.params.include_usage:
            return [DONE]
        last = self._event([])
        last["usage"] = self._used()
        return [json_access.dump(last), DONE]

    def failure(self, error: ErrorFacts) -> list[bytes]:
        """See `Answer`."""
        return [error.document()]

    def add(self, chunk: TextChunk) -> None:
        """See `Answer`."""
        self._usage.add(chunk)
        message = {"role": "assistant", "content": chunk.text, "refusal": None}
        if self._parser_options is not None:
            output = self._output(chunk.sequence, self._parser_options)
            output.feed(chunk)
            message |= _parsed_message(output)
        choice: dict[str, Any] = {
            "index": chunk.sequence, "message": message, "logprobs": None,
            "finish_reason": None,
        }  # fmt: skip
        self._end(choice, chunk)
        num_top = self._request.num_top
        if num_top is not None:
            choice["logprobs"] = chat_fragment(self._tokenizer, scored(chunk, num_top))
        self._choices[chunk.sequence] = choice

    def document(self) -> dict[str, Any]:
        """See `Answer`."""
        found = self._event([self._choices[index] for index in sorted(self._choices)])
        found["object"] = "chat.completion"
        found["usage"] = self._used()
        return found

    def _used(self) -> dict[str, Any]:
        options = self._parser_options
        if options is not None and options.reasoning:
            outputs = self._outputs.values()
            self._usage.num_reasoning = sum(output.num_reasoning for output in outputs)
        return self._usage.document()

    def _parsed_events(self, chunk: TextChunk, options: ParserOptions) -> list[bytes]:
        """An event for each segment; the last one has the end and the log-probabilities."""
        output = self._output(chunk.sequence, options)
        is_last = bool(chunk.finish_reason)
        deltas = [delta_of(each.segment, each.number, output) for each in output.feed(chunk)]
        if not deltas and (is_last or self._request.num_top is not None):
            deltas = [{}]
        choices = [self._choice(chunk.sequence, delta) for delta in deltas]
        if choices:
            self._complete(choices[-1], chunk)
        return [json_access.dump(self._event([choice])) for choice in choices]

    def _output(self, sequence: int, options: ParserOptions) -> Output:
        output = self._outputs.get(sequence)
        if output is None:
            output = self._outputs[sequence] = Output(options, self._tokenizer)
        return output

    def _end(self, choice: dict[str, Any], chunk: TextChunk) -> None:
        """Say why a choice ends, where it does."""
        if chunk.finish_reason:
            choice["finish_reason"] = finish_reason(chunk)
            output = self._outputs.get(chunk.sequence)
            if output is not None and output.calls and choice["finish_reason"] == "stop":
                choice["finish_reason"] = "tool_calls"

    def _complete(self, choice: dict[str, Any], chunk: TextChunk) -> None:
        """Add an event's end and log-probabilities."""
        self._end(choice, chunk)
        if self._request.num_top is not None:
            tokens = scored(chunk, self._request.num_top)
            content = chat_content(self._tokenizer, tokens)
            choice["logprobs"] = {"content": content, "refusal": None}

    @staticmethod
    def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        metadata = self._metadata
        event: dict[str, Any] = {
            "id": metadata.id,
            "object": "chat.completion.chunk",
            "created": metadata.created_s,
            "model": metadata.model,
            "choices": choices,
        }
        if metadata.service_tier is not None:
            event["service_tier"] = metadata.service_tier
        if self._request.params.include_usage:
            event["usage"] = None
        return event


def _parsed_message(output: Output) -> dict[str, Any]:
    """The members of a message that its segments make."""
    message: dict[str, Any] = {"content": output.text}
    if output.calls:
        message["content"] = output.text or None
        message["tool_calls"] = [call.document() for call in output.calls]
    if output.reasoning:
        message["reasoning_content"] = output.reasoning
    return message
