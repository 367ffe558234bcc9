"""LoRA tensors that no model can use, over HTTP and gRPC, and many adapters that one can: other
clients are not disturbed, and each refusal names what is wrong.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from bystanders import Watched
from repositories import build_engine, make_repository
from served import Served
from tritonclient.grpc import service_pb2 as pb

pytestmark = pytest.mark.timeout(180)

MAX_GAP_S = 1.0
MAX_GROWTH_MB = 200.0
MODEL, UNARY = "tensorrt_llm", "one_response"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
PROMPT: dict[str, tuple[str, Any]] = {
    "input_ids": ("INT32", np.array([[5, 6, 7]], "<i4")),
    "input_lengths": ("INT32", np.array([[3]], "<i4")),
    "request_output_len": ("INT32", np.array([[4]], "<i4")),
}
ATTN_Q = 1
"""The number of a module whose matrices are 256 by 256 in the demo model."""

ROW = 512
"""Weights of `ATTN_Q` at rank 1."""

LARGEST = 44 << 20
"""Bytes of an adapter just below the default limit of gRPC messages."""

Tensors = dict[str, tuple[str, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters")
    repository = make_repository(folder, build_engine(folder), decoupled_mode="True")
    # A model of one response, as HTTP takes no tensors for one of several.
    shutil.copytree(repository / MODEL, repository / UNARY)
    config = repository / UNARY / "config.pbtxt"
    text = config.read_text().replace(f'name: "{MODEL}"', f'name: "{UNARY}"', 1)
    config.write_text(re.sub(r"decoupled: *true", "decoupled: false", text, flags=re.I))
    with Served(repository, flags=("--multi-model",), log_path=folder / "serve.log") as served:
        # Helper processes of the first long body must run before memory is measured.
        for task in (1, 2):
            _post(served, {**_adapter(), "lora_task_id": _task(task)})
        with ThreadPoolExecutor(4) as clients:
            long = {"lora_name": ("BYTES", np.array([[b"n" * (4 << 20)]], object))}
            list(clients.map(lambda body: _post(served, body), [long] * 4))
        yield served


def _task(number: int) -> tuple[str, Any]:
    return "UINT64", np.array([[number]], "<u8")


def _adapter(
    weights: Any = None, config: Any = None, *, task: int = 9, dtype: str = "<f2"
) -> Tensors:
    """The inputs of an adapter; by default a good one of rank 1."""
    weights = np.zeros((1, ROW), dtype) if weights is None else weights
    config = [[ATTN_Q, 0, 1]] if config is None else config
    return {
        "lora_task_id": _task(task),
        "lora_weights": ("FP16", np.asarray(weights, dtype)[None]),
        "lora_config": ("INT32", np.asarray(config, "<i4")[None]),
    }


def _raw(array: Any) -> bytes:
    if array.dtype != object:
        return bytes(array.tobytes())
    return b"".join(len(item).to_bytes(4, "little") + item for item in array.flat)


def _post(
    server: Served, inputs: Tensors, shapes: dict[str, list[int]] | None = None
) -> tuple[int, str]:
    """Ask over HTTP with binary tensors, with ``shapes`` in place of the true ones."""
    described, data = [], []
    for name, (datatype, array) in {**PROMPT, **inputs}.items():
        raw = _raw(array)
        described.append({
            "name": name, "datatype": datatype,
            "shape": (shapes or {}).get(name, list(array.shape)),
            "parameters": {"binary_data_size": len(raw)},
        })  # fmt: skip
        data.append(raw)
    head = json.dumps({"inputs": described}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    with contextlib.closing(connection):
        path = f"/v2/models/{UNARY}/infer"
        connection.request("POST", path, b"".join((head, *data)), headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode("utf-8", "replace")


def _call(server: Served, inputs: Tensors, shapes: dict[str, list[int]] | None = None) -> str:
    """Ask over a gRPC stream: the text of the error, or nothing."""
    request = pb.ModelInferRequest(model_name=MODEL)
    for name, (datatype, array) in {**PROMPT, **inputs}.items():
        shape = (shapes or {}).get(name, list(array.shape))
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(_raw(array))
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options) as channel:
        call = channel.stream_stream(
            STREAM,
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        try:
            errors = [each.error_message for each in call(iter([request]), timeout=60)]
        except grpc.RpcError as error:
            return error.details() or error.code().name
    return "".join(errors)


@contextlib.contextmanager
def _undisturbed(server: Served, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Other clients look on within the context and are asked at its end."""
    with Watched(server.http_port, server.process.pid) as watched:
        yield
    seen = watched.seen
    with capsys.disabled():
        print(f"\n  {seen}")
    assert seen.failure == ""
    assert seen.num_events >= 5
    assert seen.stream_gap_s < MAX_GAP_S
    assert seen.health_s < MAX_GAP_S
    assert seen.grown_mb < MAX_GROWTH_MB


def _rows(count: int) -> Tensors:
    """An adapter of so many rows of one weight each."""
    config = np.tile(np.array([[ATTN_Q, 0, 1]], "<i4"), (count, 1))
    return _adapter(np.zeros((count, 1)), config)


def _long(dtype: str = "<f2", **adapter: Any) -> Tensors:
    """One row of nearly all bytes that a body may have."""
    return _adapter(np.zeros((1, LARGEST // 2), dtype), **adapter)


def _row_with(value: float) -> Any:
    weights = np.zeros((1, ROW))
    weights[0, -1] = value
    return weights


REFUSED: dict[str, tuple[Callable[[], Tensors], str]] = {
    "millions of rows": (lambda: _rows(3_000_000), "lora_config has 3000000 rows"),
    "a hundred thousand rows": (lambda: _rows(100_000), "lora_config has 100000 rows"),
    "one module twice": (lambda: _rows(2), "attn_q) of layer 0 stands there twice"),
    "a rank of a million": (
        lambda: _adapter(config=[[ATTN_Q, 0, 1_000_000]]), "adapter size 1000000 must be 1 to",
    ),
    "the largest rank": (
        lambda: _adapter(config=[[ATTN_Q, 0, 2**31 - 1]]),
        "adapter size 2147483647 must be 1 to",
    ),
    "the lowest rank": (
        lambda: _adapter(config=[[ATTN_Q, 0, -(2**31)]]),
        "adapter size -2147483648 must be 1 to",
    ),
    "44 MB and the lowest rank": (
        lambda: _long(config=[[ATTN_Q, 0, -(2**31)]]), "adapter size -2147483648 must be 1 to"
    ),
    "rank 0": (lambda: _adapter(config=[[ATTN_Q, 0, 0]]), "adapter size 0 must be 1 to"),
    "a negative module": (lambda: _adapter(config=[[-1, 0, 1]]), "the model has no module -1"),
    "a module that does not exist": (
        lambda: _adapter(config=[[2**31 - 1, 0, 1]]), "the model has no module 2147483647"
    ),
    "a negative layer": (lambda: _adapter(config=[[ATTN_Q, -1, 1]]), "in layer -1"),
    "a layer that does not exist": (
        lambda: _adapter(config=[[ATTN_Q, 2**31 - 1, 1]]), "in layer 2147483647"
    ),
    "NaN": (lambda: _adapter(_row_with(np.nan)), "holds nan, which is no finite number"),
    "infinity": (lambda: _adapter(_row_with(np.inf)), "holds inf, which is no finite number"),
    "a row that is too short": (
        lambda: _adapter(np.zeros((1, ROW - 1))), "but a row of lora_weights has 511"
    ),
    "more config than weights": (
        lambda: _adapter(config=[[ATTN_Q, 0, 1], [ATTN_Q, 1, 1]]),
        "lora_weights has 1 rows but lora_config has 2",
    ),
    "a config of two columns": (
        lambda: _adapter(config=[[ATTN_Q, 0]]), "unexpected shape for input 'lora_config'"
    ),
    "weights in 8 bytes": (
        lambda: {
            **_adapter(),
            "lora_weights": ("FP64", np.zeros((1, 1, ROW), "<f8")),
        },
        "FP64",
    ),
    "weights of whole numbers": (
        lambda: {
            **_adapter(),
            "lora_weights": ("INT32", np.zeros((1, 1, ROW), "<i4")),
        },
        "INT32",
    ),
    "a negative id": (
        lambda: {**_adapter(), "lora_task_id": ("INT64", np.array([[-1]], "<i8"))}, "INT64"
    ),
    "weights without a config": (
        lambda: {name: value for name, value in _long().items() if name != "lora_config"},
        "lora_weights is set alone",
    ),
    "a name beside an id": (
        lambda: {**_long(), "lora_name": ("BYTES", np.array([[b"north"]], object))},
        "lora_name is set beside",
    ),
    "a name of 44 MB": (
        lambda: {"lora_name": ("BYTES", np.array([[b"n" * LARGEST]], object))},
        "lora_name has 46137344 bytes",
    ),
    "a name that leaves the folder": (
        lambda: {"lora_name": ("BYTES", np.array([[b"../../../../etc"]], object))},
        "no LoRA adapter is named",
    ),
    "a name with a zero": (
        lambda: {"lora_name": ("BYTES", np.array([[b"north\0"]], object))},
        "no LoRA adapter is named",
    ),
}  # fmt: skip
"""What is sent, and a part of the answer."""


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_no_model_can_use_is_refused_alone(server, name, protocol, capsys):
    make, reason = REFUSED[name]
    inputs = make()
    with _undisturbed(server, capsys):
        if protocol == "http":
            status, text = _post(server, inputs)
            assert status == 400, text[:1000]
        else:
            text = _call(server, inputs)
    assert reason in text
    assert len(text) < 2000


SHAPES: dict[str, list[int]] = {
    "2 ** 62 rows": [1, 1 << 62, ROW],
    "a product of 2 ** 32": [1, 1 << 16, 1 << 16],
    "a product of 2 ** 64": [1, 1 << 32, 1 << 32],
    "a product of 2 ** 64 that leaves the true one": [1, (1 << 55) + 1, ROW],
    "no dimension": [],
    "no rows": [1, 0, ROW],
}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_whose_product_is_not_that_of_the_data_is_refused(
    server, name, protocol, capsys
):
    shapes = {"lora_weights": SHAPES[name]}
    with _undisturbed(server, capsys):
        if protocol == "http":
            status, text = _post(server, _adapter(), shapes)
            assert status == 400, text[:1000]
        else:
            text = _call(server, _adapter(), shapes)
    assert "lora_weights" in text


def test_a_negative_dimension_is_refused(server):
    shapes = {"lora_weights": [1, -1, -ROW]}
    status, text = _post(server, _adapter(), shapes)
    assert (status, "non-unsigned-integer" in text) == (500, True), text
    assert "lora_weights" in _call(server, _adapter(), shapes)


def test_rows_with_long_padding_are_refused_and_not_kept(server, capsys):
    with _undisturbed(server, capsys):
        found = [_post(server, _long(task=100 + number)) for number in range(4)]
    for status, text in found:
        assert status == 400, text
        assert "a row of lora_weights has 23068672 weights, but the model's largest" in text


@pytest.mark.parametrize(("protocol", "count"), [("http", 2), ("grpc", 1)])
def test_long_adapters_at_once_take_little_memory(server, protocol, count, capsys):
    """Over HTTP, the memory of their bodies alone; the gRPC library has copies of its own."""
    ask = _post if protocol == "http" else _call
    adapters = [_long(task=200 + number) for number in range(count)]
    with _undisturbed(server, capsys), ThreadPoolExecutor(count) as clients:
        found = list(clients.map(lambda one: str(ask(server, one)), adapters))
    assert all("a row of lora_weights has 23068672 weights" in each for each in found), found


def test_a_thousand_adapters_disturb_no_other_request(server, capsys):
    def one(task: int) -> tuple[int, str]:
        return _post(server, _adapter(np.full((1, ROW), task / 1e5), task=10_000 + task))

    with _undisturbed(server, capsys), ThreadPoolExecutor(8) as clients:
        found = list(clients.map(one, range(1000)))
    assert {status for status, _ in found} == {200}, found[:3]


def test_an_adapter_is_served_after_all_this(server):
    status, text = _post(server, _adapter(task=77))
    assert status == 200, text
    status, text = _post(server, {"lora_task_id": _task(77)})
    assert status == 200, text
    log = server.log()
    assert "restart" not in log.lower()
    assert "Traceback" not in log
