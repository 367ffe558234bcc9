"""Models are loaded and unloaded in a running server with active clients."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from served import Served

from tests.processes import is_alive, runs

FLAGS = (
    "--multi-model", "--model-control-mode", "explicit", "--dtype", "float32",
    "--num-threads", "1",
)  # fmt: skip
PROMPT = {"text_input": "The old man", "max_tokens": 40, "stream": True}
DEADLINE_S = 60


class Clients:
    """Clients that stream one greedy text after another until the block ends."""

    def __init__(self, server: Served, count: int) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        self.texts: list[str] = []
        self.errors: list[str] = []
        self.num_refused = 0
        """Requests that were told to come again later."""

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self.texts.append(text_of(self._server))
            except urllib.error.HTTPError as error:
                with error:
                    self._refused(error)
            except Exception as error:
                self.errors.append(repr(error))

    def _refused(self, error: urllib.error.HTTPError) -> None:
        if error.code == 503 and error.headers["Retry-After"]:
            self.num_refused += 1
            time.sleep(0.1)
        else:
            self.errors.append(repr(error))


def text_of(server: Served) -> str:
    """The text of one stream."""
    events = server.events("/v2/models/ensemble/generate_stream", PROMPT)
    return "".join(event["text_output"] for event in events)


def states(server: Served) -> dict[str, str]:
    """The state of each model that was ever loaded."""
    _, entries = server.post("/v2/repository/index", {})
    return {e["name"]: e["state"] for e in entries if "state" in e}


def ranks(server: Served) -> dict[str, psutil.Process]:
    """The processes that run an engine, by group."""
    found = {}
    for process in psutil.Process(server.process.pid).children(recursive=True):
        # Some of them end while they are looked at.
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("trimaran-rank" in word for word in process.cmdline()[:2]):
                found[process.environ()["TRIMARAN_GROUP"]] = process
    return found


@pytest.fixture(scope="module")
def engine(
    demo_engine: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An engine folder that the tests may change."""
    folder = tmp_path_factory.mktemp("own") / "engine"
    shutil.copytree(demo_engine(1), folder)
    return folder


@pytest.fixture(scope="module")
def repository(make_repository: Callable[..., Path], engine: Path) -> Path:
    """A repository that the tests may change."""
    return make_repository(engine)


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests: the first test loads the model for later tests."""
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with Served(repository, 1, FLAGS, log) as running:
        yield running
        assert running.stop() == 0


def test_in_explicit_mode_models_run_after_a_load_over_http(server):
    assert states(server) == {}
    assert ranks(server) == {}
    with triton_http.InferenceServerClient(server.url("")[7:], network_timeout=120) as client:
        client.load_model("ensemble")
        assert client.is_model_ready("ensemble")
        assert client.is_server_ready()
    assert set(states(server).values()) == {"READY"}
    assert list(ranks(server)) == ["tensorrt_llm"]
    assert text_of(server)


def test_a_changed_model_is_reloaded_without_a_failed_request(server, repository):
    expected = text_of(server)
    (repository / "tensorrt_llm" / "2").mkdir()
    url = f"127.0.0.1:{server.grpc_port}"
    with Clients(server, 4) as clients, triton_grpc.InferenceServerClient(url) as client:
        client.load_model("tensorrt_llm")
        num_before = len(clients.texts)
        server.wait_until(
            lambda: list(ranks(server)) == ["tensorrt_llm@2"], "the second version alone"
        )
        server.wait_until(lambda: len(clients.texts) >= num_before + 8, "8 more texts")
    assert (clients.errors, clients.num_refused) == ([], 0)
    assert set(clients.texts) == {expected}
    assert server.get("/v2/models/tensorrt_llm")["versions"] == ["2"]


def test_a_version_that_cannot_start_leaves_the_running_version(server, repository):
    expected = text_of(server)
    config = repository / "tensorrt_llm" / "config.pbtxt"
    kept = config.read_text()
    # The size of a block is known in the rank only.
    config.write_text(kept.replace("${kv_cache_host_memory_bytes}", "1000"))
    assert config.read_text() != kept
    try:
        status, body = server.post("/v2/repository/models/tensorrt_llm/load", {})
    finally:
        config.write_text(kept)
    assert status == 500
    assert body["error"].startswith("failed to load 'tensorrt_llm', its worker group ")
    assert "rank 0" in body["error"]
    assert server.is_ready()
    assert text_of(server) == expected
    server.wait_until(
        lambda: list(ranks(server)) == ["tensorrt_llm@2"], "the second version alone"
    )


def test_a_reload_without_free_gpus_ends_the_running_version_first(server, repository):
    expected = text_of(server)
    config = repository / "tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text().replace('"${gpu_device_ids}"', '"0"'))
    with triton_http.InferenceServerClient(server.url("")[7:], network_timeout=120) as client:
        client.load_model("tensorrt_llm")
        server.wait_until(lambda: len(ranks(server)) == 1, "one group")
        config.touch()
        with Clients(server, 4) as clients:
            server.wait_until(lambda: len(clients.texts) >= 4, "4 texts")
            client.load_model("tensorrt_llm")
            num_before = len(clients.texts)
            server.wait_until(lambda: len(clients.texts) >= num_before + 4, "4 more texts")
    assert clients.errors == []
    assert clients.num_refused > 0
    assert set(clients.texts) == {expected}
    assert len(ranks(server)) == 1


def test_the_loaded_models_outlive_the_front_end(server):
    (group,) = ranks(server)
    expected = text_of(server)
    children = psutil.Process(server.process.pid).children()
    (frontend,) = [child for child in children if runs(child, "trimaran-frontend")]
    frontend.kill()
    frontend.wait(DEADLINE_S)
    server.wait_until(server.is_ready, "ready again")
    assert text_of(server) == expected
    assert list(ranks(server)) == [group]


def test_an_unloaded_model_leaves_no_process_and_no_metric(server):
    (process,) = ranks(server).values()
    with triton_http.InferenceServerClient(server.url("")[7:], network_timeout=120) as client:
        client.unload_model("ensemble", unload_dependents=True)
        assert not client.is_model_ready("ensemble")
        server.wait_until(
            lambda: set(states(server).values()) == {"UNAVAILABLE"}, "all unloaded"
        )
        assert not is_alive(process)
        assert ranks(server) == {}
        assert server.samples("trimaran_group_up") == []
        assert server.is_ready()
        client.load_model("ensemble")
    assert text_of(server)
