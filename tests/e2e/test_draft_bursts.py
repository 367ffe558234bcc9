"""Answers whose steps have several tokens, which repetitions draft, equal plain answers."""

from __future__ import annotations

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
    flags = (
        "--speculative-decoding", "ngram", "--max-draft-tokens", "6", "--verify-all-drafts",
        "--openai-port", str(port),
    )  # fmt: skip
    log = tmp_path_factory.mktemp("log") / "serve.log"
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


def test_a_guided_answer_beside_drafted_ones_follows_its_guide(server):
    served, client = server
    guided = {
        "text_input": ECHO, "max_tokens": 60, "exclude_input_in_output": True,
        "guided_decoding_guide_type": "regex",
        "guided_decoding_guide": WORDS,
    }  # fmt: skip
    path = "/v2/models/ensemble/generate"
    _, plain = served.post(path, {**guided, "parameters": {"max_draft_tokens": 0}})
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(_ask, client, **REQUESTS["greedy"])
        _, answer = served.post(path, guided)
        other.result()

    assert answer["text_output"] == plain["text_output"]
    assert re.fullmatch(WORDS, answer["text_output"])
