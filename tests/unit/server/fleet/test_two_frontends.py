"""Two front ends of one server: the first front end and a follower."""

import os
import secrets
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from controlled_frontend import ControlledFrontend
from google.protobuf import json_format, text_format
from started_frontend import write_repository
from tritonclient.grpc.model_config_pb2 import ModelConfig

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_STRING dims: 1 }
output { name: "OUT" data_type: TYPE_STRING dims: 1 }
"""
CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils
from .words import WORD

class TritonPythonModel:
    def execute(self, requests):
        out = pb_utils.Tensor("OUT", np.array([WORD], dtype=object))
        return [pb_utils.InferenceResponse([out]) for _ in requests]
"""


class Pair:
    """A first front end in explicit mode, and another one."""

    def __init__(self, stack, tmp_path, **config):
        """``config`` is the first one's."""
        self.repository = tmp_path / "repository"
        write_repository(self.repository)
        self._stack, self._tmp_path = stack, tmp_path
        self._address = f"unix:{tmp_path}/frontends.sock"
        self.first = self.start(**config)
        folder = tmp_path / "other"
        folder.mkdir()
        self.other = ControlledFrontend(
            stack, folder, index=1, num_frontends=2, first_frontend=self._address,
            model_repository=str(self.repository),
            allow_client_shm=config.get("allow_client_shm", False),
        )  # fmt: skip
        self.other.wait_ready()

    def load(self, name):
        """Load a model of the repository, whose group connects to both front ends."""
        loading = threading.Thread(target=self.first.load, args=(name,))
        loading.start()
        self.dial_in_at_other(1)
        loading.join()

    def dial_in_at_other(self, generation):
        """Have the group of a generation, which has dialled in at the first, do so there."""
        group = "tensorrt_llm" if generation == 1 else f"tensorrt_llm@{generation}"
        self.first.wait_until(lambda: group in self.first.engines)
        self.other._start_engine(group)

    def succeed(self, **config):
        """Kill the first front end, and start another."""
        self.first.process.kill()
        self.first.process.wait()
        self.first = self.start(saved_state=self.first.saved["state"], **config)
        self.first._report("front end 1", "", 1, "up")
        self.first.wait_until(lambda: "Front end 1 has joined" in self.first.text())

    def start(self, **config):
        """Start a front end that is the first one."""
        first = ControlledFrontend(
            self._stack, self._tmp_path, num_frontends=2, first_frontend=self._address, **config
        )
        first.wait_ready()
        return first


@pytest.fixture
def pair(tmp_path, monkeypatch):
    # Models are compiled as they are by default.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    with ExitStack() as stack:
        yield Pair(stack, tmp_path)


def start_load(first):
    """The thread of a load of the token-level model that the front end's death may cut off."""

    def load():
        with suppress(OSError):
            first.load("tensorrt_llm")

    loading = threading.Thread(target=load)
    loading.start()
    return loading


def config_of(folder):
    """A model's configuration as JSON."""
    text = (folder / "config.pbtxt").read_text()
    return json_format.MessageToJson(text_format.Parse(text, ModelConfig()))


def write_model(pair, word):
    """A model that answers this word."""
    folder = pair.repository / "speaker"
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1" / "model.py").write_text(CODE)
    words = folder / "1" / "words.py"
    words.write_text(f"WORD = {word!r}\n")
    # All words are files of equal time and size, which Python's cache cannot distinguish.
    os.utime(words, (0, 0))
    return folder


def test_a_reload_with_the_same_configuration_reaches_every_front_end(pair):
    config = config_of(write_model(pair, "old"))
    ask = "POST", "/v2/models/speaker/generate", {"IN": ""}
    assert pair.first.load("speaker", config=config) == (200, None)
    assert pair.other.call(*ask)[1]["OUT"] == "old"
    assert pair.first.num_succeeded("speaker") == 1

    write_model(pair, "new")
    assert pair.first.load("speaker", config=config) == (200, None)
    assert pair.first.num_succeeded("speaker") == 0
    assert pair.first.call(*ask)[1]["OUT"] == "new"
    assert pair.other.call(*ask)[1]["OUT"] == "new"
    assert pair.first.num_succeeded("speaker") == 2


def test_the_death_of_a_front_end_loses_at_most_two_seconds_of_its_counts(
    tmp_path,
):
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, allow_metrics=False)
        assert pair.first.load("preprocessing")[0] == 200
        assert pair.other.tokenize()[0] == 200
        time.sleep(4)
        pair.other.process.kill()
        pair.other.process.wait()
        assert pair.first.num_succeeded("preprocessing") == 1


def test_counters_of_models_continue_at_a_successor(pair):
    pair.load("ensemble")
    assert pair.first.generate()[0] == 200
    assert pair.other.generate()[0] == 200
    assert pair.first.num_succeeded("ensemble") == 2

    (pair.repository / "tensorrt_llm" / "config.pbtxt").touch()
    first = pair.first
    first.conflicts["tensorrt_llm@2"] = ["tensorrt_llm"]
    first.held.add("tensorrt_llm@3")
    loading = start_load(first)
    first.wait_until(
        lambda: [g for g, _ in first.started] == ["tensorrt_llm", "tensorrt_llm@3"]
    )
    first.wait_until(lambda: first.saved["groups"] == [])
    pair.succeed(held=["tensorrt_llm@4"])
    loading.join()

    assert pair.first.index()["ensemble"][0] == "LOADING"
    pair.first.release("tensorrt_llm@4")
    pair.dial_in_at_other(4)
    pair.first.wait_until(lambda: pair.first.generate()[0] == 200)
    pair.other.wait_until(lambda: pair.other.generate()[0] == 200)
    assert pair.first.num_succeeded("ensemble") == 4
    assert pair.first.num_succeeded("tensorrt_llm") == 4


def test_a_load_interrupted_by_a_death_ends_at_all_front_ends(pair):
    first = pair.first
    first.held.add("tensorrt_llm")
    loading = start_load(first)
    pair.other.wait_until(lambda: not pair.other.is_ready())
    first.wait_until(lambda: first.saved)
    pair.succeed()
    loading.join()

    assert pair.first.is_ready()
    pair.other.wait_until(pair.other.is_ready)
    path = "/v2/models/tensorrt_llm/ready"
    assert pair.other.call("GET", path) == pair.first.call("GET", path)


def test_memory_that_a_client_registers_at_one_front_end_is_known_to_both(tmp_path):
    key = "test_" + secrets.token_hex(6)
    file = Path("/dev/shm") / key
    file.write_bytes(bytes(64))
    path = "/v2/systemsharedmemory/region/r"
    facts = {"name": "r", "key": key, "offset": 0, "byte_size": 64}
    try:
        with ExitStack() as stack:
            pair = Pair(stack, tmp_path, allow_client_shm=True)
            body = {"key": key, "byte_size": 64}
            assert pair.other.call("POST", path + "/register", body)[0] == 200
            # The other front end has the file open already.
            file.unlink()
            for frontend in (pair.first, pair.other):
                assert frontend.call("GET", path + "/status") == (200, [facts])
            assert pair.first.call("POST", path + "/unregister")[0] == 200
            assert pair.other.call("GET", path + "/status")[0] == 404
    finally:
        file.unlink(missing_ok=True)


def test_a_log_setting_that_no_message_can_hold_is_refused_at_every_front_end(pair):
    for value in (2**70, -(2**70), [[2**64]], {"a": [1]}):
        for frontend in (pair.first, pair.other):
            status, answer = frontend.call("POST", "/v2/logging", {"log_info": value})
            assert (status, "non-boolean" in answer["error"]) == (500, True), answer
            # Names that are no setting are left out, whatever their values.
            status, _ = frontend.call("POST", "/v2/logging", {"name": value, "log_info": True})
            assert status == 200
    assert "Traceback" not in pair.other.text()
