"""Expensive texts and words, sent to a server with the default flags: other clients are not
disturbed.

Each test sends one or several bad requests beside a long greedy stream and a health probe.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bystanders import Watched
from served import DEMO_MODEL, Served, init_repo, run_trimaran

pytestmark = pytest.mark.timeout(120)

MAX_INPUT_LEN = 896
MAX_GAP_S = 1.0
MAX_GROWTH_MB = 200.0
GENERATE = "/v2/models/ensemble/generate"
ASK = {"text_input": "It was a dark and", "max_tokens": 40, "bad_words": "", "stop_words": ""}
MANY = 64
"""The largest batch."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("texts")
    done = run_trimaran(
        "build", "--checkpoint", str(DEMO_MODEL), "--output", str(folder / "engine"),
        "--max-input-len", str(MAX_INPUT_LEN), "--max-batch-size", str(MANY),
        "--max-beam-width", "32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    fill = f"tokenizer_dir:{DEMO_MODEL},engine_dir:{folder / 'engine'},decoupled_mode:True"
    init_repo(str(folder / "models"), "--defaults", "--fill", fill)
    with Served(folder / "models", log_path=folder / "serve.log") as served:
        # Helper processes of the first long body or text must run before memory is measured.
        with ThreadPoolExecutor(4) as clients:
            bodies = [{**ASK, "text_input": "a " * 200_000}] * 2
            bodies += [{**ASK, "stop_words": [f"word {n}" for n in range(20_000)]}] * 2
            list(clients.map(lambda body: served.post(GENERATE, body), bodies))
        yield served


def _watched(server: Served) -> Watched:
    return Watched(server.http_port, server.process.pid)


def _check(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    seen = watched.seen
    with capsys.disabled():
        print(f"\n  {seen}")
    assert seen.failure == ""
    assert seen.num_events > 5
    assert seen.stream_gap_s < MAX_GAP_S
    assert seen.health_s < MAX_GAP_S
    assert seen.grown_mb < MAX_GROWTH_MB


def _post(
    server: Served, path: str, body: bytes, timeout_s: float = 60, **headers: str
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=timeout_s)
    with contextlib.closing(connection):
        connection.request("POST", path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


def _words(count: int) -> list[str]:
    """Words of three to five ids, which the model begins to say every now and then."""
    return [f" th{n}" for n in range(count)]


def _ensemble(**changes: Any) -> bytes:
    return json.dumps({**ASK, **changes}).encode()


def _bytes_tensor(name: str, values: list[list[str]]) -> dict[str, Any]:
    shape = [len(values), len(values[0])]
    return {
        "name": name,
        "datatype": "BYTES",
        "shape": shape,
        "data": [v for row in values for v in row],
    }


def _int_tensor(name: str, values: Any, shape: list[int]) -> dict[str, Any]:
    return {"name": name, "datatype": "INT32", "shape": shape, "data": values}


def _queries(texts: list[str]) -> bytes:
    """A request to the preprocessing model."""
    count = len(texts)
    inputs = [
        _bytes_tensor("QUERY", [[text] for text in texts]),
        _int_tensor("REQUEST_OUTPUT_LEN", [1] * count, [count, 1]),
    ]
    return json.dumps({"inputs": inputs}).encode()


SERVED: dict[str, Callable[[], tuple[str, bytes]]] = {
    "stop words and sequences": lambda: (
        f"{GENERATE}_stream",
        _ensemble(stop_words=_words(10_000), num_return_sequences=32, stream=True),
    ),
    "bad words and sequences": lambda: (
        f"{GENERATE}_stream",
        _ensemble(bad_words=_words(10_000), num_return_sequences=32, stream=True),
    ),
    "stop words and beams": lambda: (
        GENERATE, _ensemble(stop_words=_words(10_000), beam_width=32)
    ),
    "beams in a stream": lambda: (
        f"{GENERATE}_stream", _ensemble(beam_width=32, max_tokens=400, stream=True)
    ),
    "bad words of many lengths": lambda: (
        GENERATE, _ensemble(bad_words=[*_words(8000), "long " * 3000])
    ),
}  # fmt: skip
"""Requests that are answered."""


@pytest.mark.parametrize("name", SERVED)
def test_many_words_and_sequences_slow_down_no_other_request(server, name, capsys):
    path, body = SERVED[name]()
    with _watched(server) as watched:
        status, text = _post(server, path, body)
    assert status == 200, text
    assert '"error"' not in text
    _check(watched, capsys)


REFUSED: dict[str, tuple[Callable[[], tuple[str, bytes]], str]] = {
    "half a million bias words": (
        lambda: (
            GENERATE,
            _ensemble(
                embedding_bias_words=["a"] * 500_000,
                embedding_bias_weights=[1] * 500_000,
            ),
        ),
        "input 'embedding_bias_words' holds 500000 words but may hold at most 65536",
    ),
    "8 MB of text": (
        lambda: (GENERATE, _ensemble(text_input="a " * 4_000_000)),
        "Prompt length exceeds maximum input length (896): input 'text_input' has 8000000",
    ),
    "44 MB of text": (
        lambda: (GENERATE, _ensemble(text_input="a " * 22_000_000)),
        "Prompt length exceeds maximum input length (896): input 'text_input' has 44000000",
    ),
    "words that are long": (
        lambda: (GENERATE, _ensemble(stop_words=["a " * 500_000])),
        "input 'stop_words' holds words of 1000000 bytes together but may hold at most 262144",
    ),
    "8 MB for the preprocessing model": (
        lambda: ("/v2/models/preprocessing/infer", _queries(["a " * 4_000_000])),
        "input 'QUERY' has 8000000 bytes but may have at most 1048576",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_too_long_a_text_is_refused_before_it_is_tokenized(server, name, capsys):
    make, reason = REFUSED[name]
    path, body = make()
    with _watched(server) as watched:
        status, text = _post(server, path, body)
    assert status == 400, text
    assert reason in text
    _check(watched, capsys)


def test_too_many_ids_are_refused_before_detokenization(server, capsys):
    count = 6_000_000
    size = {"binary_data_size": 4 * count}
    lengths = _int_tensor("SEQUENCE_LENGTH", [count], [1, 1])
    tokens = {"name": "TOKENS_BATCH", "datatype": "INT32", "shape": [1, 1, count]}
    head = json.dumps({"inputs": [{**tokens, "parameters": size}, lengths]}).encode()
    body = head + b"\1\0\0\0" * count
    with _watched(server) as watched:
        status, text = _post(
            server,
            "/v2/models/postprocessing/infer",
            body,
            **{"Inference-Header-Content-Length": str(len(head))},
        )
    assert status == 400, text
    assert "TOKENS_BATCH holds 6000000 ids that are text, but a request may bring" in text
    _check(watched, capsys)


def test_a_short_prompt_overtakes_a_batch_of_long_texts(server, capsys):
    batch = _queries(["a " * 250_000] * 6)
    with _watched(server) as watched, ThreadPoolExecutor(1) as client:
        asked = client.submit(_post, server, "/v2/models/preprocessing/infer", batch)
        time.sleep(1.0)
        for length in (10, 400, 800):
            status, reply = server.post(GENERATE, {**ASK, "text_input": "word " * length})
            assert status == 200, reply
        assert not asked.done()
        status, text = asked.result()
    assert status == 200, text[:1000]
    _check(watched, capsys)


def test_work_for_a_disconnected_client_is_dropped(server, capsys):
    with _watched(server) as watched:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        with contextlib.closing(connection):
            batch = _queries(["a " * 250_000] * MANY)
            connection.request("POST", "/v2/models/preprocessing/infer", batch)
            time.sleep(4)
        # A batch of 64 such texts would take more than the request waits.
        one = _queries(["b " * 200_000])
        status, text = _post(server, "/v2/models/preprocessing/infer", one, timeout_s=30)
        assert status == 200, text[:1000]
    _check(watched, capsys)


def test_no_process_of_the_server_was_restarted(server):
    log = server.log()
    assert "restart" not in log.lower()
    assert Path(server.log_path).exists()
