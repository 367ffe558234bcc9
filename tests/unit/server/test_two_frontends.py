"""Two front ends of one server, of which one follows the other."""

from contextlib import ExitStack

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

class TritonPythonModel:
    def execute(self, requests):
        out = pb_utils.Tensor("OUT", np.array([WORD], dtype=object))
        return [pb_utils.InferenceResponse([out]) for _ in requests]
"""


class Pair:
    """A first front end in explicit mode, and another one."""

    def __init__(self, stack, tmp_path):
        self.repository = tmp_path / "repository"
        write_repository(self.repository)
        self._stack, self._tmp_path = stack, tmp_path
        self._address = f"unix:{tmp_path}/frontends.sock"
        self.first = self.start()
        folder = tmp_path / "other"
        folder.mkdir()
        self.other = ControlledFrontend(
            stack, folder, index=1, num_frontends=2, first_frontend=self._address,
            model_repository=str(self.repository),
        )  # fmt: skip
        self.other.wait_ready()

    def start(self, **config):
        """Start a front end that is the first one."""
        first = ControlledFrontend(
            self._stack, self._tmp_path, num_frontends=2, first_frontend=self._address, **config
        )
        first.wait_ready()
        return first


@pytest.fixture
def pair(tmp_path):
    with ExitStack() as stack:
        yield Pair(stack, tmp_path)


def config_of(folder):
    """A model's configuration as JSON."""
    text = (folder / "config.pbtxt").read_text()
    return json_format.MessageToJson(text_format.Parse(text, ModelConfig()))


def write_model(pair, word):
    """A model that answers this word."""
    folder = pair.repository / "speaker"
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1" / "model.py").write_text(CODE.replace("WORD", repr(word)))
    return folder


def test_a_model_that_is_loaded_again_with_the_same_configuration_is_so_everywhere(pair):
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
