"""Python models that are loaded, changed and unloaded while the server runs."""

import psutil
import pytest
from controlled_frontend import with_nothing_loaded

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
        return [self.answer(request) for request in requests]

    def answer(self, request):
        if not pb_utils.is_model_ready("preprocessing"):
            pb_utils.load_model(model_name="preprocessing")
        try:
            pb_utils.load_model("nothing")
        except pb_utils.TritonModelException as error:
            assert "failed to poll from model repository" in str(error)
        word = request.inputs()[0].as_numpy().reshape(1, 1)
        call = pb_utils.InferenceRequest(
            model_name="preprocessing",
            inputs=[
                pb_utils.Tensor("QUERY", word),
                pb_utils.Tensor("REQUEST_OUTPUT_LEN", np.array([[1]], np.int32)),
            ],
        )
        outputs = call.exec()
        length = pb_utils.get_output_tensor_by_name(outputs, "REQUEST_INPUT_LEN")
        text = f"GREETING {length.as_numpy().item()}"
        out = np.array([text], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)])

    def finalize(self):
        open("MARKER", "a").write("GREETING ended;")
"""


@pytest.fixture
def frontend(tmp_path):
    """A server in explicit mode with nothing loaded."""
    with with_nothing_loaded(tmp_path) as frontend:
        yield frontend


def write_model(frontend, tmp_path, greeting):
    """The model, or the same with another greeting."""
    folder = frontend.repository / "greeter" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "config.pbtxt").write_text(CONFIG)
    code = CODE.replace("GREETING", greeting).replace("MARKER", str(tmp_path / "ended"))
    (folder / "model.py").write_text(code)


def greet(frontend):
    return frontend.call("POST", "/v2/models/greeter/generate", {"IN": "hello"})[1]["OUT"]


def model_processes(frontend):
    return psutil.Process(frontend.process.pid).children()


def test_a_python_model_is_reloaded_with_its_files_and_loads_the_models_it_calls(
    frontend, tmp_path
):
    write_model(frontend, tmp_path, "hello")
    assert frontend.load("greeter") == (200, None)
    text = greet(frontend)
    assert text.startswith("hello ")
    assert frontend.index()["preprocessing"] == ("READY", None)
    write_model(frontend, tmp_path, "goodbye")
    assert frontend.load("greeter") == (200, None)
    assert greet(frontend) == text.replace("hello", "goodbye")
    frontend.wait_until((tmp_path / "ended").exists)
    assert (tmp_path / "ended").read_text() == "hello ended;"
    write_model(frontend, tmp_path, "broken(")
    (frontend.repository / "greeter" / "1" / "model.py").write_text("broken(")
    status, answer = frontend.load("greeter")
    assert status == 500
    assert "SyntaxError" in answer["error"]
    assert greet(frontend).startswith("goodbye ")
    frontend.unload("greeter")
    frontend.wait_until(lambda: not model_processes(frontend))
    assert (tmp_path / "ended").read_text() == "hello ended;goodbye ended;"


def test_the_processes_of_models_end_with_their_front_end(frontend, tmp_path):
    write_model(frontend, tmp_path, "hello")
    frontend.load("greeter")
    (process,) = model_processes(frontend)
    frontend.process.kill()
    process.wait(60)
