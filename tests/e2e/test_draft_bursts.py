"""Answers whose steps have several tokens, which repetitions draft, equal plain answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from served import DEMO_MODEL, Served

from trimaran.bench.serving.free_ports import free_ports

ECHO = "the old man and the sea and the old man and the sea and "
WORDS = "(sea|man|old)( sea| man| old){5}"
SCHEMA = {
    "type": "array", "minItems": 6, "maxItems": 6, "items": {
        "type": "object", "properties": {"animal": {"enum": ["cat", "dog"]}},
        "required": ["animal"], "additionalProperties": False,
    },
}  # fmt: skip
GUIDES = {
    "regex": ("regex", WORDS),
    "schema": ("json_schema", json.dumps(SCHEMA)),
    "grammar": ("ebnf_grammar", 'root ::= ("man and sea " | "old and new "){5}'),
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"animals": SCHEMA}, "required": ["animals"],
}}}  # fmt: skip
CHATS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {
        "type": "json_schema", "json_schema": {"name": "animals", "schema": SCHEMA},
    }},
    "tool call": {"tools": [TOOL], "tool_choice": "required"},
}  # fmt: skip
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.7, "seed": 11},
    "penalties": {"temperature": 0, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "stop word": {"temperature": 0, "stop": ["sea and the", "\n\n"]},
    "log-probs": {"temperature": 0.7, "seed": 12, "logprobs": 2},
    "several": {"temperature": 0.9, "seed": 13, "n": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def server(
    build_engine: Callable[..., Path],
    make_repository: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Served, openai.OpenAI]]:
    """A server that drafts by itself, and verifies each draft whether or not it saves time."""
    engine = build_engine(DEMO_MODEL, "--dtype", "float32")
    repository = make_repository(engine, guided_decoding_backend="xgrammar")
    (port,) = free_ports(1)
    folder = tmp_path_factory.mktemp("log")
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    flags = (
        "--speculative-decoding", "ngram", "--max-draft-tokens", "6", "--verify-all-drafts",
        "--openai-port", str(port), "--chat-template", str(folder / "chat.jinja"),
        "--tool-call-parser", "hermes",
    )  # fmt: skip
    log = folder / "serve.log"
    with Served(repository, 1, flags, log) as running:
        url = f"http://localhost:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield running, client


def _ask(client: openai.OpenAI, *, stream: bool = False, **fields: Any) -> Any:
    """What an answer says whatever the number of tokens in a step: texts, tokens with their
    log-probabilities, and reasons, by choice."""
    answer = client.completions.create(
        model="ensemble", prompt=ECHO, max_tokens=60, stream=stream, extra_body=fields
    )
    texts: dict[int, str] = {}
    tokens: dict[int, list[tuple[str, float]]] = {}
    reasons: dict[int, str] = {}
    for event in answer if stream else (answer,):
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            found = choice.logprobs
            if found is not None:
                pairs = zip(found.tokens, found.token_logprobs, strict=True)
                told = tokens.setdefault(choice.index, [])
                told += [(token, round(value, 3)) for token, value in pairs]
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    return texts, tokens, reasons


@pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS)
def test_an_answer_with_drafts_is_the_answer_without(server, fields):
    _, client = server
    plain = _ask(client, max_draft_tokens=0, **fields)

    assert _ask(client, **fields) == plain


@pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS)
def test_a_stream_with_drafts_says_what_the_stream_without_says(server, fields):
    _, client = server
    plain = _ask(client, stream=True, max_draft_tokens=0, **fields)

    assert _ask(client, stream=True, **fields) == plain


def test_drafts_are_accepted_unless_the_request_wants_none(server):
    served, _ = server
    request = {"text_input": ECHO, "max_tokens": 60, "return_perf_metrics": True}
    for parameters, is_drafted in (({}, True), ({"max_draft_tokens": 0}, False)):
        status, answer = served.post(
            "/v2/models/ensemble/generate", {**request, "parameters": parameters}
        )
        assert status == 200, answer
        assert (answer["total_draft_tokens"] > 0) == is_drafted
        assert (answer["total_accepted_draft_tokens"] > 0) == is_drafted
        assert (answer["acceptance_rate"] > 0) == is_drafted


@pytest.mark.parametrize("guide", GUIDES.values(), ids=GUIDES)
def test_a_guided_answer_with_drafts_is_the_answer_without(server, guide):
    served, client = server
    kind, text = guide
    asked = {
        "text_input": ECHO, "max_tokens": 80, "exclude_input_in_output": True,
        "return_perf_metrics": True, "guided_decoding_guide_type": kind,
        "guided_decoding_guide": text,
    }  # fmt: skip
    path = "/v2/models/ensemble/generate"
    none = {**asked, "parameters": {"max_draft_tokens": 0}}
    for sampling in ({}, {"top_k": 40, "temperature": 1.2, "random_seed": 4}):
        _, plain = served.post(path, {**none, **sampling})
        # Beside another request with drafts, which follows no guide.
        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(_ask, client, **REQUESTS["greedy"])
            _, answer = served.post(path, {**asked, **sampling})
            other.result()
        assert answer["text_output"] == plain["text_output"]
        assert answer["total_draft_tokens"] > 0
        assert kind != "regex" or re.fullmatch(text, answer["text_output"])
        streams = [
            "".join(event["text_output"] for event in served.events(f"{path}_stream", body))
            for body in ({**asked, **sampling}, {**none, **sampling})
        ]
        assert streams[0] == streams[1]


@pytest.mark.parametrize("form", CHATS.values(), ids=CHATS)
def test_events_of_a_guided_chat_with_drafts_are_those_without(server, form):
    _, client = server

    def events(**fields: Any) -> list[Any]:
        answer = client.chat.completions.create(
            model="ensemble", messages=[{"role": "user", "content": ECHO}], max_tokens=90,
            temperature=0.8, seed=5, stream=True, extra_body=fields, **form,
        )  # fmt: skip
        found = []
        for event in answer:
            for choice in event.choices:
                calls = [
                    (call.index, call.function.name, call.function.arguments)
                    for call in choice.delta.tool_calls or ()
                ]
                found.append((choice.delta.content, calls, choice.finish_reason))
        return found

    def joined(found: list[Any]) -> Any:
        """Texts and arguments, however many tokens an event has."""
        texts = "".join(content or "" for content, _, _ in found)
        calls: dict[int, list[str]] = {}
        for _, parts, _ in found:
            for index, name, arguments in parts:
                told = calls.setdefault(index, ["", ""])
                told[0] += name or ""
                told[1] += arguments or ""
        return texts, calls, [reason for _, _, reason in found if reason]

    plain = joined(events(max_draft_tokens=0))

    assert joined(events()) == plain
    assert plain[1] or plain[0].lstrip().startswith("[")
