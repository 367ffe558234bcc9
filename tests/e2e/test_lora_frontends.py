"""Adapters that come to several front ends: an id means what an engine took last."""

from __future__ import annotations

import json

import numpy as np
import pytest
from several import Several

INFER = "/v2/models/ensemble/infer"
ATTN_Q, NO_MODULE = 1, 91
WIDTH = 256
"""Inputs and outputs of the demo model's queries."""


@pytest.fixture(scope="module")
def server(demo_engine, make_repository, tmp_path_factory):
    repository = make_repository(demo_engine(1), decoupled_mode="False")
    flags = ("--frontend-processes", "2")
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with Several(repository, flags=flags, log_path=log) as served:
        served.wait_log("curl")
        yield served


def ask(server, frontend, task, seed=0, module=ATTN_Q):
    """Status and answer of a request with an adapter to one front end; a request with
    ``seed`` sends the weights."""
    inputs = [
        _listed("text_input", "BYTES", [1, 1], ["The ship"]),
        _listed("max_tokens", "INT32", [1, 1], [12]),
        _listed("lora_task_id", "UINT64", [1, 1], [task]),
    ]
    data = b""
    if seed:
        random = np.random.default_rng(seed)
        data = random.normal(size=(1, 8, 2 * WIDTH)).astype(np.float16).tobytes()
        config = [number for layer in range(8) for number in (module, layer, 1)]
        inputs.append(_listed("lora_config", "INT32", [1, 8, 3], config))
        weights = _listed("lora_weights", "FP16", [1, 8, 2 * WIDTH], None)
        weights["parameters"] = {"binary_data_size": len(data)}
        inputs.append(weights)
    head = json.dumps({"inputs": inputs}).encode()
    connection = server.connect(frontend)
    headers = {"Inference-Header-Content-Length": str(len(head))}
    connection.request("POST", INFER, head + data, headers)
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    if answer.status != 200:
        return answer.status, body["error"]
    outputs = {output["name"]: output["data"] for output in body["outputs"]}
    return 200, outputs["text_output"][0]


def _listed(name, datatype, shape, data):
    tensor = {"name": name, "datatype": datatype, "shape": shape}
    return tensor if data is None else {**tensor, "data": data}


@pytest.mark.matrix(keep=0)
def test_an_adapter_id_keeps_its_newest_weights_over_a_restart(server):
    expected = {}
    for task, order in ((7, (0, 1)), (8, (1, 0)), (9, (0, 0))):
        first, second = (ask(server, f, task, 2 * task + n) for n, f in enumerate(order))
        assert first[0] == second[0] == 200
        assert first != second
        expected[task] = second
    status, text = ask(server, 0, 9, seed=1, module=NO_MODULE)
    assert (status, str(NO_MODULE) in text) == (400, True), text

    def answers():
        return [{task: ask(server, index, task) for task in expected} for index in (0, 1)]

    assert answers() == [expected] * 2
    (rank,) = server.ranks()
    num_served = server.log().count("serving front end")
    rank.kill()
    server.wait_log("serving front end", num_served + 2)

    assert answers() == [expected] * 2
