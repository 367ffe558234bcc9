"""Several front ends behind one port: to clients they are one server."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from served import ROOT
from several import DEADLINE_S, Several
from waiting import wait_until

EXAMPLES = ROOT / "examples"
NUM_FRONTENDS = 3
STREAM = "/v2/models/ensemble/generate_stream"
UNLOAD_ALL = {"parameters": {"unload_dependents": True}}
GENERATE = "/v2/models/ensemble/generate"
PROMPT: dict[str, Any] = {"text_input": "The ship", "max_tokens": 8}


class Stream(threading.Thread):
    """A streamed request on a connection, read to its end."""

    def __init__(self, connection: http.client.HTTPConnection, **fields: Any) -> None:
        super().__init__(daemon=True)
        self._connection = connection
        connection.request("POST", STREAM, json.dumps({**PROMPT, "stream": True, **fields}))
        self._answer = connection.getresponse()
        assert self._answer.status == 200
        self.events: list[dict[str, Any]] = []
        self.start()

    def run(self) -> None:
        """Collect the events."""
        for line in self._answer:
            if line.startswith(b"data: "):
                self.events.append(json.loads(line[6:]))

    def wait_begun(self) -> None:
        """Return once a token has come."""

        def ended() -> str:
            return "" if self.is_alive() else "the stream ended"

        wait_until(lambda: bool(self.events), "a first token", ended=ended)

    def text(self) -> str:
        """All of the text, once the stream has ended."""
        self.join(DEADLINE_S)
        assert not self.is_alive()
        self._answer.close()
        self._connection.close()
        return "".join(event["text_output"] for event in self.events)


@pytest.fixture(scope="module")
def server(
    demo_engine: Callable[[int], Path],
    make_repository: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Several]:
    flags = (
        "--frontend-processes", str(NUM_FRONTENDS), "--model-control-mode", "explicit",
        "--load-model", "ensemble",
    )  # fmt: skip
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with Several(make_repository(demo_engine(1)), flags=flags, log_path=log) as served:
        served.wait_log("curl")
        yield served


def test_every_front_end_gives_the_same_answers_and_common_metrics(server: Several) -> None:
    before = server.succeeded(0)

    answers = [server.call(i, "POST", GENERATE, PROMPT) for i in range(NUM_FRONTENDS)]

    assert answers[0][0] == 200
    assert answers[0][1]["text_output"]
    assert all(answer == answers[0] for answer in answers)
    counts = [server.succeeded(index) for index in range(NUM_FRONTENDS)]
    assert counts == [before + NUM_FRONTENDS] * NUM_FRONTENDS
    labels = {"model": "ensemble", "version": "1"}
    assert server.metric("nv_inference_request_success", **labels) == counts[0]
    of_tokens = server.metric("nv_llm_output_token_len_count", model="tensorrt_llm")
    assert of_tokens >= NUM_FRONTENDS


def test_a_request_is_stopped_by_its_id_at_another_front_end(server: Several) -> None:
    whole = server.call(0, "POST", GENERATE, {**PROMPT, "max_tokens": 800})[1]
    stop = {"id": "long", "stop": True, "input_ids": [1], "request_output_len": 1}
    another = server.connect(2)
    stream = Stream(server.connect(1), id="long", max_tokens=800)
    stream.wait_begun()

    server.ask(another, "POST", "/v2/models/tensorrt_llm/generate_stream", stop)

    text = stream.text()
    assert len(text) < len(whole["text_output"])
    assert whole["text_output"].startswith(PROMPT["text_input"] + text)


def test_a_load_or_unload_at_one_front_end_reaches_all_front_ends(server: Several) -> None:
    path = "/v2/repository/models/tensorrt_llm_bls"
    own = "/v2/models/tensorrt_llm_bls/ready"

    loaded = server.call(1, "POST", f"{path}/load")[0]
    ready = [server.call(index, "GET", own)[0] for index in range(NUM_FRONTENDS)]
    unloaded = server.call(2, "POST", f"{path}/unload")[0]
    gone = [server.call(index, "GET", own)[0] for index in range(NUM_FRONTENDS)]
    indices = [server.call(i, "POST", "/v2/repository/index")[1] for i in range(NUM_FRONTENDS)]

    assert (loaded, unloaded) == (200, 200)
    assert ready == [200] * NUM_FRONTENDS
    assert all(status >= 400 for status in gone)
    assert indices == [indices[0]] * NUM_FRONTENDS


def test_a_python_model_runs_at_every_front_end(server: Several) -> None:
    shutil.copytree(EXAMPLES / "python_models" / "chat", server.repository / "chat")
    body = {"question": "Who came in?", "earlier": ["It was late."], "max_tokens": 12}
    prompt = "It was late.\nQuestion: Who came in?\nAnswer:"
    whole = {"text_input": prompt, "max_tokens": 12, "stop_words": ["Question:"]}

    def processes() -> list[psutil.Process]:
        return [each for frontend in server.frontends() for each in frontend.children()]

    def chat(index: int) -> str:
        connection = server.connect(index)
        connection.request("POST", "/v2/models/chat/generate_stream", json.dumps(body))
        events = connection.getresponse().read().decode().split("\n\n")
        connection.close()
        found = [json.loads(event.removeprefix("data: ")) for event in events if event]
        return prompt + "".join(event["answer"] for event in found)

    log_start = len(server.log())
    loaded = server.call(1, "POST", "/v2/repository/models/chat/load")[0]
    num_processes = len(processes())
    answers = [chat(index) for index in range(NUM_FRONTENDS)]
    unloaded = server.call(2, "POST", "/v2/repository/models/chat/unload")[0]

    assert (loaded, unloaded, num_processes) == (200, 200, NUM_FRONTENDS)
    expected = server.call(0, "POST", GENERATE, whole)[1]["text_output"]
    assert answers == [expected] * NUM_FRONTENDS
    server.wait_until(lambda: not processes(), "end of the processes of the model")
    # Only lines of Trimaran: libraries log nothing when a process starts.
    lines = server.log()[log_start:].splitlines()
    assert [line for line in lines if not re.match(r"\d{4}-\d\d-\d\dT", line)] == []


def test_a_model_is_unloaded_after_the_streams_of_all_front_ends(
    server: Several,
) -> None:
    path = "/v2/repository/models/ensemble"
    whole = server.call(0, "POST", GENERATE, {**PROMPT, "max_tokens": 300})[1]["text_output"]
    stream = Stream(server.connect(2), max_tokens=300)
    stream.wait_begun()
    (rank,) = server.ranks()

    status, _ = server.call(1, "POST", f"{path}/unload", UNLOAD_ALL)
    refused = [server.call(index, "POST", GENERATE, PROMPT)[0] for index in range(3)]
    text = stream.text()
    server.wait_until(lambda: not rank.is_running(), "end of the rank")
    loaded = server.call(2, "POST", f"{path}/load")
    answers = [server.call(i, "POST", GENERATE, PROMPT)[1] for i in range(NUM_FRONTENDS)]

    assert status == 200
    assert all(code >= 400 for code in refused)
    assert PROMPT["text_input"] + text == whole
    assert loaded[0] == 200, loaded
    assert answers[0]["text_output"]
    assert answers == [answers[0]] * NUM_FRONTENDS


def test_streams_of_all_front_ends_survive_the_death_of_a_rank(server: Several) -> None:
    whole = server.call(0, "POST", GENERATE, {**PROMPT, "max_tokens": 800})[1]["text_output"]
    replays = server.metric("trimaran_replayed_requests")
    (rank,) = server.ranks()
    streams = [Stream(connection, max_tokens=800) for connection in server.connect_all()]
    for stream in streams:
        stream.wait_begun()

    rank.kill()

    texts = [PROMPT["text_input"] + stream.text() for stream in streams]
    assert texts == [whole] * NUM_FRONTENDS
    assert server.metric("trimaran_replayed_requests") == replays + NUM_FRONTENDS


def test_log_and_trace_settings_are_the_same_at_every_front_end(server: Several) -> None:
    path = "/v2/models/ensemble/trace/setting"
    server.call(2, "POST", path, {"trace_rate": "7"})
    rates = [server.call(i, "GET", path)[1]["trace_rate"] for i in range(NUM_FRONTENDS)]
    assert rates == ["7"] * NUM_FRONTENDS

    server.call(2, "POST", "/v2/logging", {"log_warning": False})
    settings = [server.call(i, "GET", "/v2/logging")[1] for i in range(NUM_FRONTENDS)]
    server.call(1, "POST", "/v2/logging", {"log_warning": True})

    assert [each["log_warning"] for each in settings] == [False] * NUM_FRONTENDS


@pytest.mark.parametrize("index", [1, 0])
def test_a_dead_front_end_loses_only_its_own_connections(server: Several, index: int) -> None:
    expected = server.call(2, "POST", GENERATE, {**PROMPT, "max_tokens": 300})[1]
    server.call(index, "POST", GENERATE, PROMPT)
    before = server.succeeded(2)
    pid = server.named(index).pid
    stream = Stream(server.connect(2), max_tokens=300)
    stream.wait_begun()

    os.kill(pid, signal.SIGKILL)
    text = stream.text()
    server.wait_until(lambda: len(server.frontends()) == NUM_FRONTENDS, "all front ends")
    server.wait_log(f"front end{f' {index}' * bool(index)}: ready", 2)

    assert PROMPT["text_input"] + text == expected["text_output"]
    answer = server.call(index, "POST", GENERATE, PROMPT)
    assert answer == server.call(2, "POST", GENERATE, PROMPT)
    # The stream and these two; what the dead one had counted stays.
    assert server.succeeded(index) == before + 3
    # The surviving front ends follow a new first front end.
    server.call(index, "POST", "/v2/logging", {"log_error": False})
    settings = [server.call(i, "GET", "/v2/logging")[1] for i in range(NUM_FRONTENDS)]
    server.call(index, "POST", "/v2/logging", {"log_error": True})
    assert [each["log_error"] for each in settings] == [False] * NUM_FRONTENDS
    assert "does not follow" not in server.log()


@pytest.mark.parametrize("dies", ["first", "first and rank"])
def test_streams_of_an_unloaded_model_outlive_the_first_front_end(
    server: Several, dies: str
) -> None:
    path = "/v2/repository/models/ensemble"
    whole = server.call(0, "POST", GENERATE, {**PROMPT, "max_tokens": 500})[1]["text_output"]
    num_ready = server.log().count("front end: ready")
    connections = server.connect_all()
    streams = [Stream(connection, max_tokens=500) for connection in connections[1:]]
    for stream in streams:
        stream.wait_begun()
    (rank,) = server.ranks()

    assert server.ask(connections[0], "POST", f"{path}/unload", UNLOAD_ALL)[0] == 200
    server.named(0).kill()
    if dies == "first and rank":
        rank.kill()

    server.wait_log("front end: ready", num_ready + 1)
    assert [PROMPT["text_input"] + stream.text() for stream in streams] == [whole] * 2
    server.wait_until(lambda: not server.ranks(), "end of the ranks")
    assert server.call(1, "POST", f"{path}/load")[0] == 200
    answers = [server.call(i, "POST", GENERATE, PROMPT)[1] for i in range(NUM_FRONTENDS)]
    assert answers[0]["text_output"]
    assert answers == [answers[0]] * NUM_FRONTENDS


def test_a_drain_waits_for_the_streams_of_all_front_ends(server: Several) -> None:
    streams = [Stream(connection, max_tokens=400) for connection in server.connect_all()]
    for stream in streams:
        stream.wait_begun()

    code = server.stop()

    texts = [stream.text() for stream in streams]
    assert texts[0]
    assert texts == [texts[0]] * NUM_FRONTENDS
    assert code == 0
