"""Long answers, and long gRPC requests: no stream waits, and the results are equal."""

import asyncio
import gzip
import json
import socket
import struct
import threading

import grpc
import numpy as np
import pytest
from loop_watch import LONGEST_PAUSE_S, LoopWatch
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.unit.server.small_models import ECHO, EchoModel
from trimaran.server.inference import cooperative
from trimaran.server.inference.cooperative import CHUNK_BYTES, CHUNK_ITEMS
from trimaran.server.inference.validation import MAX_STRINGS
from trimaran.server.protocol import infer_response

HUGE = 12 << 20
FLOATS = np.random.default_rng(0).standard_normal(HUGE // 16, np.float32)
EMPTY_STRINGS = bytes(4 * MAX_STRINGS)
ANY_SIZE = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


@pytest.fixture
def stub(server):
    with grpc.insecure_channel(server.grpc_url, ANY_SIZE) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def post_blob(server, name, datatype, count, blob, **parameters):
    """Have the server echo a tensor."""
    tensor = {"name": name, "datatype": datatype, "shape": [count],
              "parameters": {"binary_data_size": len(blob)}}  # fmt: skip
    head = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    return server.post("/v2/models/echo/infer", head + blob, length)


def message_of(name, datatype, count, blob=None, **contents):
    message = pb.ModelInferRequest(model_name="echo")
    tensor = message.inputs.add(name=name, datatype=datatype, shape=[count])
    for field, values in contents.items():
        getattr(tensor.contents, field).extend(values)
    if blob is not None:
        message.raw_input_contents.append(blob)
    return message


def packed(strings):
    return b"".join(struct.pack("<I", len(string)) + string for string in strings)


def generate(server, action):
    body = b'{"FP32":[%b]}' % b",".join([b"%.9g" % value for value in FLOATS])
    return lambda: server.post(f"/v2/models/echo/{action}", body)


def infer_json(server, _):
    return lambda: post_blob(server, "FP32", "FP32", len(FLOATS), FLOATS.tobytes())


def infer_strings(server, _, **parameters):
    count = len(EMPTY_STRINGS) // 4
    return lambda: post_blob(server, "TEXT", "BYTES", count, EMPTY_STRINGS, **parameters)


def unary(server, stub):
    message = message_of("TEXT", "BYTES", len(EMPTY_STRINGS) // 4, EMPTY_STRINGS)
    return lambda: stub.ModelInfer(message)


def stream(server, stub):
    message = message_of("TEXT", "BYTES", len(EMPTY_STRINGS) // 4, EMPTY_STRINGS)
    return lambda: list(stub.ModelStreamInfer(iter([message])))


def contents(server, stub):
    numbers = FLOATS.tolist() * 3
    message = message_of("FP32", "FP32", len(numbers), fp32_contents=numbers)
    return lambda: stub.ModelInfer(message)


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize(
    "prepare",
    [
        infer_json,
        infer_strings,
        lambda server, stub: infer_strings(server, stub, binary_data_output=True),
        lambda server, stub: generate(server, "generate"),
        lambda server, stub: generate(server, "generate_stream"),
        unary,
        stream,
        contents,
    ],
    ids=["JSON numbers", "JSON strings", "binary strings", "generate", "generate_stream",
         "gRPC strings", "gRPC stream", "gRPC contents"],
)  # fmt: skip
def test_no_stream_waits_for_a_huge_answer(server, stub, prepare):
    run = prepare(server, stub)
    with LoopWatch(server) as watch:
        answer = run()
    assert watch.longest_s < LONGEST_PAUSE_S
    if isinstance(answer, list):
        (message,) = answer
        assert message.error_message == ""
    elif not isinstance(answer, pb.ModelInferResponse):
        assert answer.status == 200, answer.body[:300]


@pytest.mark.parametrize("count", [0, 1, CHUNK_ITEMS - 1, CHUNK_ITEMS, 2 * CHUNK_ITEMS + 1])
@pytest.mark.parametrize("is_binary", [False, True])
def test_any_number_of_values_is_returned(server, count, is_binary):
    values = np.arange(count, dtype=np.int64) - 7
    answer = post_blob(
        server, "INT64", "INT64", count, values.tobytes(), binary_data_output=is_binary
    )
    assert answer.status == 200
    if is_binary and count:
        start = int(answer.headers["Inference-Header-Content-Length"])
        assert answer.body[start:] == values.tobytes()
    else:
        (output,) = answer.json["outputs"]
        assert output.get("data", []) == values.tolist()
        assert output["shape"] == [count]
    generated = server.post("/v2/models/echo/generate", {"INT64": values.tolist()})
    if count > 1:
        assert generated.json["OUT_INT64"] == values.tolist()


@pytest.mark.parametrize(
    "strings",
    [
        [b""] * (3 * CHUNK_ITEMS),
        ["ö".encode() * (CHUNK_BYTES // 2 + 1), b"", b"\xff\0", b"a" * CHUNK_BYTES],
        [b"%d" % number * 500 for number in range(2 * CHUNK_ITEMS)],
    ],
    ids=["empty", "long", "many"],
)
def test_strings_of_any_length_are_returned(server, stub, strings):
    blob = packed(strings)
    texts = [string.decode("utf-8", "surrogateescape") for string in strings]
    answer = post_blob(server, "TEXT", "BYTES", len(strings), blob)
    found = json.loads(answer.body.decode("utf-8", "surrogateescape"))
    assert found["outputs"][0]["data"] == texts
    answer = post_blob(server, "TEXT", "BYTES", len(strings), blob, binary_data_output=True)
    assert answer.body[int(answer.headers["Inference-Header-Content-Length"]) :] == blob
    answer = server.post(
        "/v2/models/echo/generate",
        json.dumps({"TEXT": texts}, ensure_ascii=False).encode("utf-8", "surrogateescape"),
    )
    assert json.loads(answer.body.decode("utf-8", "surrogateescape"))["OUT_TEXT"] == texts
    for message in (
        message_of("TEXT", "BYTES", len(strings), blob),
        message_of("TEXT", "BYTES", len(strings), bytes_contents=strings),
    ):
        assert stub.ModelInfer(message).raw_output_contents == [blob]
        (response,) = stub.ModelStreamInfer(iter([message]))
        assert response.infer_response.raw_output_contents == [blob]


def test_long_and_short_outputs_keep_their_order(server):
    many = list(range(2 * CHUNK_ITEMS))
    inputs = [
        ("INT64", "INT64", many),
        ("TEXT", "BYTES", ['"data":[null]', "x"]),
        ("INT8", "INT8", []),
        ("UINT64", "UINT64", many[::-1]),
        ("FP32", "FP32", [0.5]),
    ]
    body = {
        "id": '"data":[null]',
        "inputs": [
            {"name": name, "datatype": datatype, "shape": [len(data)], "data": data}
            for name, datatype, data in inputs
        ],
        "outputs": [{"name": f"OUT_{name}"} for name, _, _ in inputs],
    }
    answer = server.post("/v2/models/echo/infer", body)
    assert answer.json == {
        "id": body["id"],
        "model_name": "echo",
        "model_version": "1",
        "outputs": [{**entry, "name": f"OUT_{entry['name']}"} for entry in body["inputs"]],
    }
    body["outputs"][3]["parameters"] = {"binary_data": True}
    answer = server.post("/v2/models/echo/infer", body)
    start = int(answer.headers["Inference-Header-Content-Length"])
    assert answer.body[start:] == np.array(many[::-1], np.uint64).tobytes()
    found = json.loads(answer.body[:start])["outputs"]
    assert [entry.get("data") for entry in found] == [
        None if name == "UINT64" else data for name, _, data in inputs
    ]


@pytest.mark.parametrize("value", [0.5, -3.0, 1e30])
def test_a_single_float_is_no_list(server, value):
    answer = server.post("/v2/models/echo/generate", {"FP32": value})
    assert answer.json["OUT_FP32"] == float(np.float32(value))


LONG = np.random.default_rng(1).standard_normal(300_001, np.float32)
"""More than a megabyte, of which the text is made while it is sent."""


def test_long_numbers_are_sent_in_chunks(server):
    data = LONG.tolist()
    body = {"FP32": data, "INT8": [1, 2, 3]}
    inputs = [
        {"name": "FP32", "datatype": "FP32", "shape": [len(data)], "data": data},
        {"name": "INT8", "datatype": "INT8", "shape": [3], "data": [1, 2, 3]},
        {"name": "INT64", "datatype": "INT64", "shape": [200_000], "data": [*range(200_000)]},
    ]
    expected = [{**entry, "name": f"OUT_{entry['name']}"} for entry in inputs]
    for coding in ("identity", "gzip"):
        accepted = {"Accept-Encoding": coding}
        found = server.post("/v2/models/echo/generate", body, accepted)
        assert found.json["OUT_FP32"] == data and found.json["OUT_INT8"] == [1, 2, 3]
        infer = server.post("/v2/models/echo/infer", {"inputs": inputs}, accepted)
        text = infer.body if coding == "identity" else gzip.decompress(infer.body)
        assert json.loads(text)["outputs"] == expected
        assert found.headers["Transfer-Encoding"] == "chunked"
        assert ("Content-Length" in infer.headers) == (coding == "gzip")
    (event,) = server.post("/v2/models/echo/generate_stream", body).body.split(b"\n\n")[:-1]
    assert json.loads(event.removeprefix(b"data: "))["OUT_FP32"] == data


def test_a_client_of_http_1_0_reads_long_numbers_up_to_the_end(server):
    body = json.dumps({"FP32": LONG.tolist()}).encode()
    head = b"POST /v2/models/echo/generate HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", server.http_port)) as sock:
        sock.sendall(head + body)
        with sock.makefile("rb") as answer:
            found = answer.read()
    sent_head, text = found.split(b"\r\n\r\n", 1)
    assert b"200" in sent_head and b"chunked" not in sent_head.lower()
    assert json.loads(text)["OUT_FP32"] == LONG.tolist()


def test_long_numbers_without_a_json_form_are_refused_before_an_answer_begins(server):
    half = np.zeros(1 << 20, np.float16)
    answer = post_blob(server, "FP16", "FP16", len(half), half.tobytes())
    assert answer.status == 400
    assert "sending FP16 data via JSON is not supported" in answer.json["error"]


def test_an_unread_long_answer_waits_and_ends_with_its_connection(fresh_server, caplog):
    count = HUGE // 2
    tensor = {"name": "INT8", "datatype": "INT8", "shape": [count],
              "parameters": {"binary_data_size": count}}  # fmt: skip
    head = json.dumps({"inputs": [tensor]}).encode()
    lines = (
        "POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\n"
        f"Content-Length: {len(head) + count}\r\n\r\n"
    )
    admission = fresh_server.service.admission
    with socket.create_connection(("127.0.0.1", fresh_server.http_port)) as sock:
        sock.sendall(lines.encode() + head + bytes(count))
        answer = sock.recv(1 << 10)
        assert answer.startswith(b"HTTP/1.1 200")
        # The rest of the answer, and thus the request, waits for the reader.
        assert admission.num_running == 1
    fresh_server.wait_until(lambda: not admission.num_running)
    assert fresh_server.get("/v2/health/live").status == 200
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "field", "values", "dtype"),
    [
        ("INT8", "int_contents", [1, -2, 300], np.int8),
        ("INT64", "int64_contents", [1, -(1 << 63)], np.int64),
        ("UINT64", "uint64_contents", [1, (1 << 64) - 1], np.uint64),
        ("FP32", "fp32_contents", [0.5, -3.0], np.float32),
    ],
)
def test_long_contents_decode_like_short_contents(server, stub, name, field, values, dtype):
    many = values * CHUNK_ITEMS
    answer = stub.ModelInfer(message_of(name, name, len(many), **{field: many}))
    found = np.frombuffer(answer.raw_output_contents[0], dtype)
    short = stub.ModelInfer(message_of(name, name, len(values), **{field: values}))
    expected = np.frombuffer(short.raw_output_contents[0], dtype)
    assert found.tolist() == expected.tolist() * CHUNK_ITEMS


def test_a_truncated_string_behind_many_strings_is_found(server, stub):
    blob = bytes(5 * 4 * CHUNK_ITEMS) + b"\x05\0\0\0ab"
    message = message_of("TEXT", "BYTES", 5 * CHUNK_ITEMS + 1, blob)
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message)
    assert caught.value.details() == (
        "incomplete string data for inference input 'TEXT', expecting string of length 5 but "
        "only 2 bytes available"
    )


@pytest.mark.parametrize("has_same_config", [True, False])
def test_a_model_replaced_while_a_request_is_checked_is_not_run(
    fresh_server, monkeypatch, has_same_config
):
    monkeypatch.setattr(cooperative, "SLICE_S", 0.0)
    config = (
        ECHO
        if has_same_config
        else ECHO + 'input { name: "NEW" data_type: TYPE_INT8 dims: 1 optional: true }'
    )
    old = fresh_server.service.registry.get("echo")
    # As a load does: the new version counts from 0.
    fresh_server.metrics.forget(old.name, old.version)
    new = fresh_server.metrics.measure(EchoModel(config))

    async def replace():
        while not fresh_server.service.admission.num_running:
            await asyncio.sleep(0)
        fresh_server.service.registry.publish([new])

    replacing = asyncio.run_coroutine_threadsafe(replace(), fresh_server.loop)
    with grpc.insecure_channel(fresh_server.grpc_url, ANY_SIZE) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        message = message_of("TEXT", "BYTES", 1 << 20, bytes(4 << 20))
        if has_same_config:
            assert stub.ModelInfer(message).raw_output_contents == [bytes(4 << 20)]
        else:
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(message)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    replacing.result(60)
    assert old.statistics.message().inference_stats.success.count == 0
    assert new.statistics.message().inference_stats.success.count == has_same_config


def test_millions_of_values_are_classified_outside_the_event_loop(server, monkeypatch):
    threads = []
    classify = infer_response.classify

    def noted(*given, **options):
        threads.append(threading.get_ident())
        return classify(*given, **options)

    monkeypatch.setattr(infer_response, "classify", noted)
    loop_thread = server.run(_thread())
    for count in (100, 100_000):
        body = {
            "inputs": [
                {"name": "INT64", "datatype": "INT64", "shape": [count],
                 "data": list(range(count))}
            ],
            "outputs": [{"name": "OUT_INT64", "parameters": {"classification": 1}}],
        }  # fmt: skip
        (output,) = server.post("/v2/models/echo/infer", body).json["outputs"]
        assert output["data"] == [f"{count - 1}:{count - 1}"]
    short, long = threads
    assert short == loop_thread != long


async def _thread():
    return threading.get_ident()
