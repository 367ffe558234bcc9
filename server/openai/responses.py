"""Answers of ``/v1/responses``: items, and the events that build them."""

from __future__ import annotations

import uuid
from typing import Any

from trimaran.server.models.text_request import TextChunk
from trimaran.server.models.tokenizer import Tokenizer
from trimaran.server.openai.answers import ResponseMetadata, Usage
from trimaran.server.openai.errors import ErrorFacts
from trimaran.server.openai.log_probs import ScoredToken, chat_content
from trimaran.server.openai.outputs import Output
from trimaran.server.openai.parsing.scanner import Kind
from trimaran.server.openai.requests import GenerationRequest
from trimaran.server.openai.tools import ParserOptions
from trimaran.server.protocol import json_access
from trimaran.server.protocol.json_access import Fragment

_ERROR_CODES = {"rate_limit_exceeded": "rate_limit_exceeded"}
"""The codes of errors that responses know; any other is ``server_error``."""

_DEPTH = 8
"""From an event's object to the log-probabilities of a token in its response."""

_PREFIXES = {Kind.TEXT: "msg_", Kind.REASONING: "rs_", Kind.CALL: "fc_"}


class ResponseAnswer:
    """See `Answer`. One item is open at a time; another kind of segment closes it."""

    def __init__(
        self,
        metadata: ResponseMetadata,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        usage: Usage,
    ) -> None:
        self._metadata = metadata
        self._request = request
        self._usage = usage
        options = request.parser_options or ParserOptions()
        self._tokenizer = tokenizer
        self._output = Output(options, tokenizer, request.num_top)
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        self._open: Kind | None = None
        self._parts: list[str] = []
        """Parts of the open item's text or arguments; a growing text would be copied often."""
        self._log_probs: list[Fragment] = []
        """Log-probabilities of the open item's tokens, as JSON."""

        self._num_calls = 0
        """Calls that are items already."""
        self._is_cut = False
        self._error: dict[str, Any] | None = None

    @property
    def closes_at_once(self) -> bool:
        """See `Answer`. The last events repeat all log-probabilities."""
        return self._request.num_top is None

    def opening(self) -> list[bytes]:
        """See `Answer`."""
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def events(self, chunk: TextChunk) -> list[bytes]:
        """See `Answer`."""
        self._usage.add(chunk)
        events: list[bytes] = []
        for part in self._output.feed(chunk):
            segment = part.segment
            if segment.kind is Kind.ARGUMENTS:
                events.append(self._delta("function_call_arguments", segment.text))
                self._parts.append(segment.text)
                continue
            if segment.kind is Kind.CALL or segment.kind is not self._open:
                events += self._close()
                events += self._begin(segment.kind)
            if segment.kind is not Kind.CALL:
                name, extra = "reasoning_text", {}
                if segment.kind is Kind.TEXT:
                    name, extra = "output_text", {"logprobs": self._scored(part.tokens)}
                events.append(self._delta(name, segment.text, content_index=0, **extra))
                self._parts.append(segment.text)
        self._is_cut = chunk.finish_reason == "length"
        return events

    def closing(self) -> list[bytes]:
        """See `Answer`. The stream has no last line of its own."""
        events = self._close()
        status = "incomplete" if self._is_cut else "completed"
        return [*events, self._event(f"response.{status}", response=self._response(status))]

    def failure(self, error: ErrorFacts) -> list[bytes]:
        """See `Answer`: an event of the error, and the end of the response."""
        code = error.shown_code
        told = self._event("error", code=code, message=error.message, param=error.param)
        self._is_cut = True
        events = self._close()
        self._error = {"code": _ERROR_CODES.get(code or "", "server_error"),
                       "message": error.message}  # fmt: skip
        return [
            told,
            *events,
            self._event("response.failed", response=self._response("failed")),
        ]

    def add(self, chunk: TextChunk) -> None:
        """See `Answer`."""
        self.events(chunk)
        self._close()

    def document(self) -> dict[str, Any]:
        """See `Answer`."""
        found = self._response("incomplete" if self._is_cut else "completed")
        if self._request.num_top is not None:
            found["output"] = Fragment(json_access.dump_in_parts(self._items, _DEPTH))
        return found

    # ---- items --------------------------------------------------------------------------

    def _scored(self, tokens: list[ScoredToken]) -> list[dict[str, Any]]:
        """The log-probabilities of a delta, which are kept for the whole item too."""
        contents = chat_content(self._tokenizer, tokens)
        self._log_probs += [Fragment(json_access.dump(content)) for content in contents]
        for content in contents:
            for each in (content, *content["top_logprobs"]):
                del each["bytes"]
        return contents

    def _begin(self, kind: Kind) -> list[bytes]:
        """Open an item."""
        item: dict[str, Any] = {"id": f"{_PREFIXES[kind]}{uuid.uuid4().hex}"}
        if kind is Kind.CALL:
            call = self._output.calls[self._num_calls]
            self._num_calls += 1
            item |= {
                "type": "function_call", "call_id": call.id, "name": call.name,
                "arguments": "", "status": "in_progress",
            }  # fmt: skip
        elif kind is Kind.TEXT:
            item |= {
                "type": "message", "role": "assistant", "status": "in_progress", "content": [],
            }  # fmt: skip
        else:
            item |= {"type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        self._open = kind
        self._items.append(item)
        events = [self._event("response.output_item.added", **self._item_fields(), item=item)]
        if kind is not Kind.CALL:
            item["content"] = [_part(kind)]
            fields = {**self._item_fields(has_item=True), "content_index": 0}
            part = item["content"][0]
            events.append(self._event("response.content_part.added", **fields, part=part))
        return events

    def _close(self) -> list[bytes]:
        """Close the open item."""
        kind, self._open = self._open, None
        if kind is None:
            return []
        item, fields = self._items[-1], self._item_fields(has_item=True)
        item["status"] = "incomplete" if self._is_cut else "completed"
        text, self._parts = "".join(self._parts), []
        if kind is Kind.CALL:
            item["arguments"] = text
            done = self._event(
                "response.function_call_arguments.done",
                **fields, name=item["name"], arguments=item["arguments"],
            )  # fmt: skip
            events = [done]
        else:
            part = item["content"][0]
            part["text"] = text
            fields["content_index"] = 0
            name = "output_text" if kind is Kind.TEXT else "reasoning_text"
            extra: dict[str, Any] = {}
            if kind is Kind.TEXT:
                part["logprobs"], self._log_probs = self._log_probs, []
                extra["logprobs"] = part["logprobs"]
            events = [
                self._event(f"response.{name}.done", **fields, text=part["text"], **extra),
                self._event("response.content_part.done", **fields, part=part),
            ]
        return [
            *events,
            self._event("response.output_item.done", **self._item_fields(), item=item),
        ]

    def _item_fields(self, *, has_item: bool = False) -> dict[str, Any]:
        fields: dict[str, Any] = {"output_index": len(self._items) - 1}
        if has_item:
            fields["item_id"] = self._items[-1]["id"]
        return fields

    def _delta(self, name: str, text: str, **fields: Any) -> bytes:
        return self._event(
            f"response.{name}.delta", **self._item_fields(has_item=True), **fields, delta=text
        )

    # ---- the whole ----------------------------------------------------------------------

    def _event(self, kind: str, **members: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **members}
        self._num_events += 1
        # The fields of a server-sent event may have any order.
        is_short = self._request.num_top is None
        data = json_access.dump(event) if is_short else json_access.dump_in_parts(event, _DEPTH)
        return data + b"\nevent: " + kind.encode()

    def _response(self, status: str) -> dict[str, Any]:
        metadata, is_over = self._metadata, status != "in_progress"
        return {
            "id": metadata.id,
            "object": "response",
            "created_at": metadata.created_s,
            "status": status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "model": metadata.model,
            "output": self._items,
            "previous_response_id": None,
            "store": False,
            **self._request.repeated,
            "text": self._request.repeated.get("text") or {"format": {"type": "text"}},
            "usage": self._used() if is_over else None,
            "service_tier": metadata.service_tier,
        }

    def _used(self) -> dict[str, Any]:
        usage = self._usage
        cached = {"cached_tokens": usage.num_cached, "cache_write_tokens": 0}
        return {
            "input_tokens": usage.num_input,
            "input_tokens_details": cached,
            "output_tokens": usage.num_output,
            "output_tokens_details": {"reasoning_tokens": self._output.num_reasoning},
            "total_tokens": usage.num_input + usage.num_output,
        }


def _part(kind: Kind) -> dict[str, Any]:
    if kind is Kind.TEXT:
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": ""}
