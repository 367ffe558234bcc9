"""Guides with slow compilation or slow masks: other requests neither wait nor fail."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from bystander import Bystander
from repositories import build_engine, make_repository
from served import Served

EXACT = ("--dtype", "float32", "--num-threads", "1")
MAX_GAP_S = 1.0
MAX_HONEST_S = 10.0
GUIDED = "guided_decoding_guide"


def _schema(first: int) -> str:
    """An object of strings with lengths, which takes half a minute and more to compile."""
    lengths = range(first, first + 300)
    properties = {f"of {most}": {"type": "string", "maxLength": most} for most in lengths}
    return json.dumps({"type": "object", "properties": properties})


def _choice(first: int) -> str:
    texts = [f"value {first} {place * 7919 % 1000003}" for place in range(12_000)]
    return json.dumps(texts)


AMBIGUOUS = "root ::= root root root | root root | [a-z ]"

SLOW: dict[str, list[dict[str, Any]]] = {
    "an ambiguous grammar": [
        {f"{GUIDED}_type": "ebnf_grammar", GUIDED: AMBIGUOUS, "max_tokens": 400}
    ],
    "many sequences of an ambiguous grammar": [
        {
            f"{GUIDED}_type": "ebnf_grammar", GUIDED: AMBIGUOUS, "max_tokens": 400,
            "num_return_sequences": 32, "temperature": 1.0, "top_k": 50,
        }
    ],
    "eight ambiguous grammars": [
        {
            f"{GUIDED}_type": "ebnf_grammar", "max_tokens": 400,
            GUIDED: f'{AMBIGUOUS} | "{number}"',
        }
        for number in range(8)
    ],
    "grammars of optional repetitions": [
        {
            f"{GUIDED}_type": "ebnf_grammar", "max_tokens": 300,
            GUIDED: f'root ::= a a a a a a\na ::= b* b* b* | a a | "{number}"\nb ::= [a-z ]*',
        }
        for number in range(4)
    ],
    "deep recursion": [
        {
            f"{GUIDED}_type": "ebnf_grammar", "max_tokens": 400,
            GUIDED: 'root ::= "(" root ")" | "(" root root ")" | "(" root | "" | [a-z ]+',
        }
    ],
    "regular expressions of many states": [
        {f"{GUIDED}_type": "regex", GUIDED: guide, "max_tokens": 400}
        for guide in (
            "[a-z]{1,100000}", "(([a-z ]*)*)*", "([a-z ]{0,40}){0,40}x", "(a?){500}a{500}",
        )
    ],
    "schemas and choices that compile for long": [
        *(
            {f"{GUIDED}_type": "json_schema", GUIDED: _schema(first), "max_tokens": 50}
            for first in (10, 11, 12)
        ),
        *(
            {f"{GUIDED}_type": "choice", GUIDED: _choice(first), "max_tokens": 50}
            for first in (1, 2)
        ),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo model on one rank, with guides under short limits."""
    folder = tmp_path_factory.mktemp("guides")
    engine = build_engine(folder)
    repository = make_repository(folder, engine, guided_decoding_backend="xgrammar")
    flags = (*EXACT, "--guide-timeout", "6", "--guide-step-timeout", "0.2")
    with Served(repository, 1, flags, folder / "serve.log") as served:
        assert _ask(served, {f"{GUIDED}_type": "regex", GUIDED: "[0-9]{3}"})[0] == 200
        yield served


def _ask(server: Served, fields: dict[str, Any]) -> tuple[int, Any]:
    body = {"text_input": "Once upon a time", "max_tokens": 20, **fields}
    return server.post("/v2/models/ensemble/generate", body, timeout_s=200)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", SLOW)
def test_other_requests_do_not_wait_for_slow_guides(server: Served, case: str) -> None:
    """A stream and probes go on, an honest guide is followed, and each request has an end."""
    with Bystander(server) as bystander, ThreadPoolExecutor(16) as pool:
        slow = [pool.submit(_ask, server, fields) for fields in SLOW[case]]
        longest_s = 0.0
        for number in range(5):
            time.sleep(0.5)
            began = time.monotonic()
            honest = {f"{GUIDED}_type": "regex", GUIDED: f"[0-9]{{{3 + number}}}"}
            status, answer = _ask(server, honest)
            assert status == 200, answer
            longest_s = max(longest_s, time.monotonic() - began)
        answers = [each.result(100) for each in slow]

    gaps = bystander.gaps
    print(f"\n{case}: {gaps}, honest {longest_s:.2f} s, {len(bystander.texts)} text(s)")
    for status, answer in answers:
        print(status, str(answer)[:200])
        # A guide has limits of time, which a flag sets, and of memory.
        assert status == 200 or "--guide" in str(answer) or "memory" in str(answer)
    assert not gaps.errors
    assert gaps.stream_s < MAX_GAP_S
    assert gaps.probe_s < MAX_GAP_S
    assert longest_s < MAX_HONEST_S
    assert len(bystander.texts) <= 1


def test_a_slow_guide_fails_with_the_limit_and_the_remedy(server: Served) -> None:
    """The ambiguous grammar ends by the time of one mask."""
    status, answer = _ask(server, SLOW["an ambiguous grammar"][0])

    assert status == 400, answer
    assert "takes more than" in answer["error"]
    assert "--guide-step-timeout" in answer["error"]
