"""The separate ports of the administration, and the server's secrets in processes of Python
models."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request

import pytest
import tritonclient.grpc as grpcclient
from controlled_frontend import DEADLINE_S, with_nothing_loaded
from tritonclient.utils import InferenceServerException

from trimaran.comm.env import SUPERVISOR, TOKEN
from trimaran.server.access.config import AccessConfig

MOVED = "requests are served on the administration port (--admin-port {}), not on this one"
CONFIG = {
    "backend": "python",
    "input": [{"name": "IN", "data_type": "TYPE_STRING", "dims": [1]}],
    "output": [{"name": "OUT", "data_type": "TYPE_STRING", "dims": [1]}],
}
SPY = """
import json, os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        links = {}
        for name in os.listdir("/proc/self/fd"):
            try:
                links[name] = os.readlink("/proc/self/fd/" + name)
            except OSError:
                pass
        seen = {
            "environ": open("/proc/self/environ", "rb").read().decode(errors="replace"),
            "now": dict(os.environ),
            "argv": open("/proc/self/cmdline", "rb").read().decode(),
            "links": links,
        }
        out = pb_utils.Tensor("OUT", np.array([json.dumps(seen)], dtype=object))
        return [pb_utils.InferenceResponse([out]) for _ in requests]
"""


def ask(port, method, path, value=None):
    """Status and JSON of a request."""
    body = None if value is None else json.dumps(value).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            status, content = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, content = error.code, error.read()
    return status, json.loads(content) if content else None


@pytest.fixture
def frontend(tmp_path):
    """A server in explicit mode with separate administration ports."""
    access = AccessConfig(admin_port=0, admin_grpc_port=0)
    with with_nothing_loaded(tmp_path, access=access) as frontend:
        yield frontend


def test_serving_ports_refuse_administration_requests(frontend):
    serving, admin = frontend.http_port(), frontend._port("administration")
    for method, path, category in (
        ("POST", "/v2/repository/models/preprocessing/load", "model-repository"),
        ("POST", "/v2/repository/models/preprocessing/unload", "model-repository"),
        ("POST", "/v2/repository/index", "model-repository"),
        ("GET", "/v2/logging", "logging"), ("POST", "/v2/logging", "logging"),
        ("GET", "/v2/trace/setting", "trace"), ("POST", "/v2/trace/setting", "trace"),
    ):  # fmt: skip
        status, document = ask(serving, method, path, {} if method == "POST" else None)
        assert (status, list(document)) == (403, ["error"])
        assert document["error"].startswith(f"{category} requests are served on the admin")
        assert ask(admin, method, path, {} if method == "POST" else None)[0] == 200
    assert ask(serving, "GET", "/v2/health/live")[0] == 200
    assert ask(admin, "GET", "/v2/health/live")[0] == 200
    status, document = ask(admin, "POST", "/v2/models/preprocessing/infer", {})
    assert status == 403
    assert "use the serving ports" in document["error"]


def test_grpc_has_an_administration_port_too(frontend):
    admin = frontend._port("gRPC administration")
    with grpcclient.InferenceServerClient(f"127.0.0.1:{frontend.grpc_port()}") as client:
        with pytest.raises(InferenceServerException, match="administration port") as caught:
            client.load_model("preprocessing")
        assert caught.value.status() == "StatusCode.PERMISSION_DENIED"
        with pytest.raises(InferenceServerException, match="administration port"):
            client.update_log_settings({"log_verbose_level": 1})
    with grpcclient.InferenceServerClient(f"127.0.0.1:{admin}") as client:
        client.load_model("preprocessing")
        assert client.is_model_ready("preprocessing")
        assert client.get_model_repository_index().models


def test_a_python_model_process_inherits_no_token(tmp_path):
    with with_nothing_loaded(tmp_path, is_forked=False) as frontend:
        files = {"file:1/model.py": base64.b64encode(SPY.encode()).decode()}
        status, document = frontend.load("spy", config=json.dumps(CONFIG), **files)
        assert status == 200, document
        inputs = [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": ["x"]}]
        status, document = frontend.call("POST", "/v2/models/spy/infer", {"inputs": inputs})
        assert status == 200, document
        seen = json.loads(document["outputs"][0]["data"][0])
    assert seen["now"]["PATH"]
    for text in (seen["environ"], seen["argv"], json.dumps(seen["now"])):
        assert "secret" not in text
        assert TOKEN not in text
        assert SUPERVISOR not in text
    # Its input and output, maybe twice, the socket of the front end, and the listed folder.
    links = seen["links"].items()
    standard = {link for number, link in links if int(number) <= 2}
    others = {link for number, link in links if int(number) > 2} - standard
    sockets = {link for link in others if link.startswith("socket:")}
    assert len(sockets) == 1, others
    assert all(link.startswith("/proc/") for link in others - sockets), others
