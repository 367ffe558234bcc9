"""Long JSON bodies are read in other processes: no stream waits, and the results are equal."""

import asyncio
import gzip
import json
import socket
import struct
import threading
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from loop_watch import LONGEST_PAUSE_S, LoopWatch
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.server.administration import CONTROL_REFUSED
from trimaran.server.decoding import decoder
from trimaran.server.decoding.body import LONG_BYTES, SHORT_BYTES, LongBody
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.decoding.process import Refusal
from trimaran.server.http import infer as http_infer
from trimaran.server.inference.validation import MAX_STRINGS

MANY = 300_000
"""Items of a body that has more than half as many values as a body may have."""

INFER = b'{"inputs":[{"name":"%b","datatype":"%b","shape":[%d],"data":[%b]}]}'


def bodies_of(number, members=100_000):
    return {
        "nested numbers": (
            "echo/infer", INFER % (b"INT8", b"INT8", 1, b"[[0]]," * number + b"0"), 500
        ),
        "objects": ("echo/infer", INFER % (b"INT8", b"INT8", 1, b"{}," * members + b"0"), 500),
        "parameters": (
            "echo/infer",
            b'{"inputs":[],"parameters":{%b"x":1}}'
            % b"".join(b'"p%d":1,' % each for each in range(2 * members)),
            400,
        ),
        "outputs": (
            "echo/infer", b'{"inputs":[],"outputs":[%b{}]}' % (b'{"name":"A"},' * members), 400
        ),
        "strings": (
            "repeat/generate",
            b'{"text_input":"a","max_tokens":1,"bad_words":[%b"x"]}' % (b'"ab",' * 2 * number),
            200,
        ),
    }  # fmt: skip


BODIES = bodies_of(MANY)


def test_a_helper_that_keeps_memory_is_replaced(fresh_server, monkeypatch):
    me, body = (
        psutil.Process(),
        json.dumps({"text_input": "a" * 2 * LONG_BYTES, "max_tokens": 1}).encode(),
    )
    before = set(me.children())

    def helpers():
        assert fresh_server.post("/v2/models/repeat/generate", body).status == 200
        return set(me.children()) - before

    (first,) = helpers()
    assert helpers() == {first}
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "_MAX_KEPT_BYTES", -(1 << 40))
        helpers()
        first.wait(60)
    (second,) = helpers()
    assert second != first


def test_a_long_request_to_load_is_refused_where_clients_load_nothing(fresh_server):
    before = set(psutil.Process().children())
    path = "/v2/repository/models/echo/load"
    answer = fresh_server.post(path, b'{"parameters":{"a":"%b"}}' % (b"x" * 2 * SHORT_BYTES))
    assert (answer.status, answer.error) == (503, CONTROL_REFUSED)
    assert set(psutil.Process().children()) == before


def long_texts(num_bytes=2 * SHORT_BYTES):
    """Strings of all kinds."""
    kinds = ["", "a", "öl", "\x00", "\udcff", "a" * 1000, '"\\']
    return kinds * (num_bytes // 1000)


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize("kind", BODIES)
def test_no_stream_waits_for_a_huge_body(server, kind):
    path, body, status = BODIES[kind]
    with LoopWatch(server) as watch:
        answer = server.post(f"/v2/models/{path}", body)
    assert answer.status == status
    assert "values" not in str(answer.body[:1000])
    assert watch.longest_s < LONGEST_PAUSE_S


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize("kind", BODIES)
def test_a_body_of_too_many_values_is_refused_before_any_is_made(fresh_server, kind):
    path, body, _ = bodies_of(2 * MANY, 300_000)[kind]
    me = psutil.Process()
    before = set(me.children())
    answer = fresh_server.post(f"/v2/models/{path}", body)
    assert answer.status == 400
    assert answer.error in (
        "a request has at most 1048576 values (members, elements and parameters), and this has "
        "more. Send tensors as binary data, or use --http-max-input-size to increase the "
        "limit.",
        "a request has at most 262144 JSON objects and members of objects, and this has more. "
        "Send only the members that the model knows.",
    )
    (process,) = set(me.children()) - before
    assert process.memory_info().rss < 192 << 20


def test_commas_and_brackets_in_strings_do_not_count_as_values(server):
    body = json.dumps({"text_input": 'a,[{"\\' * 400_000, "max_tokens": 1}).encode()
    answer = server.post("/v2/models/repeat/generate", body)
    assert answer.status == 200


@pytest.mark.parametrize(
    ("name", "datatype", "values"),
    [
        ("FP32", "FP32", [0.1, -3.0, 1e300, 7] * 50_000),
        ("INT8", "INT8", [1, -2, 127, 300] * 50_000),
        ("UINT64", "UINT64", [0, 1 << 63] * 50_000),
        ("TEXT", "BYTES", long_texts()),
    ],
)
def test_long_tensors_decode_like_short_tensors(server, name, datatype, values):
    def tensor(data):
        return {"inputs": [{"name": name, "datatype": datatype, "shape": [len(data)],
                            "data": data}]}  # fmt: skip

    def body(data):
        text = json.dumps(tensor(data), ensure_ascii=False)
        return text.encode("utf-8", "surrogateescape")

    assert len(body(values)) > SHORT_BYTES
    answer = server.post("/v2/models/echo/infer", body(values))
    assert answer.status == 200
    few = len(set(values))
    expected = server.post("/v2/models/echo/infer", body(values[:few]))
    data = answer.body.decode("utf-8", "surrogateescape")
    short = expected.body.decode("utf-8", "surrogateescape")
    got = json.loads(data)["outputs"][0]["data"]
    assert got == json.loads(short)["outputs"][0]["data"] * (len(values) // few)


def test_binary_data_after_long_json_belongs_to_its_inputs(server):
    halves, words = np.arange(50, dtype=np.float16), [b"ab", b"", b"\xff"]
    packed = b"".join(struct.pack("<I", len(word)) + word for word in words)
    numbers = list(range(100_000))
    head = json.dumps(
        {
            "inputs": [
                {"name": "FP16", "datatype": "FP16", "shape": [50],
                 "parameters": {"binary_data_size": 100}},
                {"name": "INT64", "datatype": "INT64", "shape": [100_000], "data": numbers},
                {"name": "TEXT", "datatype": "BYTES", "shape": [3],
                 "parameters": {"binary_data_size": len(packed)}},
            ],
            "parameters": {"binary_data_output": True, "mine": 1.5},
        }
    ).encode()  # fmt: skip
    length = {"Inference-Header-Content-Length": str(len(head))}
    answer = server.post("/v2/models/echo/infer", head + halves.tobytes() + packed, length)
    assert answer.status == 200
    start = int(answer.headers["Inference-Header-Content-Length"])
    assert json.loads(answer.body[:start])["parameters"]["mine"] == 1.5
    expected = halves.tobytes() + np.array(numbers, np.int64).tobytes() + packed
    assert answer.body[start:] == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("echo/infer", b'{"a" 1}'),
        ("echo/infer", b"[]"),
        ("echo/infer", b'{"id":1}'),
        ("echo/infer", b'{"inputs":[{"name":"A"}]}'),
        ("echo/infer", b'{"inputs":[],"parameters":{"a":[]}}'),
        ("echo/infer", INFER % (b"INT8", b"INT8", 1, b"-1,2")),
        ("echo/infer", INFER % (b"FP32", b"FP32", 1, b'"1"')),
        ("double/infer", INFER % (b"X", b"INT32", 2, b"1,2")),
        ("repeat/generate", b'{"text_input":3}'),
        ("repeat/generate", b'{"text_input":"a","max_tokens":1,"mine":{}}'),
        ("repeat/generate_stream", b'{"max_tokens":1,"max_tokens":2}'),
    ],
)
def test_errors_of_long_bodies_equal_those_of_short_bodies(server, path, body):
    short = server.post(f"/v2/models/{path}", body)
    long = server.post(f"/v2/models/{path}", body + b" " * SHORT_BYTES)
    assert short.status >= 400
    assert (long.status, long.error) == (short.status, short.error)


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("cut", [1, 0])
def test_no_stream_waits_for_millions_of_strings_after_the_json(server, cut):
    blob = bytes(4 * MAX_STRINGS - cut)
    shape = [len(blob) // 4]
    head = json.dumps(
        {
            "inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": shape,
                        "parameters": {"binary_data_size": len(blob)}}],
            "outputs": [{"name": "OUT_INT8"}],
        }
    ).encode()  # fmt: skip
    length = {"Inference-Header-Content-Length": str(len(head))}
    with LoopWatch(server) as watch:
        answer = server.post("/v2/models/echo/infer", head + blob, length)
    assert watch.longest_s < LONGEST_PAUSE_S
    if cut:
        assert answer.error == (
            "[request id: <id_unknown>] incomplete string length indicator for inference input "
            "'TEXT' for model 'echo', expecting 4 bytes but only 3 bytes available. Please "
            "make sure the string length indicator is in one buffer."
        )
    else:
        assert answer.status == 200


def test_long_bodies_are_decoded_and_encoded_outside_the_event_loop(server, monkeypatch):
    threads = []
    for name in ("compress", "decompress"):
        work = getattr(http_infer, name)

        def noted(*given, work=work):
            threads.append(threading.get_ident())
            return work(*given)

        monkeypatch.setattr(http_infer, name, noted)
    loop_thread = asyncio.run_coroutine_threadsafe(_thread(), server.loop).result()
    values = list(range(100_000))
    body = json.dumps(
        {"inputs": [{"name": "INT64", "datatype": "INT64", "shape": [100_000], "data": values}]}
    )
    headers = {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
    answer = server.post("/v2/models/echo/infer", gzip.compress(body.encode()), headers)
    assert json.loads(gzip.decompress(answer.body))["outputs"][0]["data"] == values
    assert len(threads) == 2 and loop_thread not in threads


async def _thread():
    return threading.get_ident()


def test_decoding_for_a_disconnected_client_ends(fresh_server):
    body = BODIES["parameters"][1]
    head = (
        f"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    me = psutil.Process()
    before = set(me.children())
    with socket.create_connection(("127.0.0.1", fresh_server.http_port)) as sock:
        sock.sendall(head.encode() + body)
        fresh_server.wait_until(lambda: set(me.children()) - before)
        (process,) = set(me.children()) - before
    process.wait(120)
    small = INFER % (b"INT8", b"INT8", 200_000, (b"1," * 200_000)[:-1])
    assert fresh_server.post("/v2/models/echo/infer", small).status == 200


def test_a_decoding_process_without_a_waiting_request_leaves_nothing(monkeypatch):
    answered, go_on = threading.Event(), threading.Event()

    def exchange(process, *arguments):
        answered.set()
        go_on.wait(30)
        return Refusal("read, but too late", None)

    monkeypatch.setattr("trimaran.server.decoding.decoder._Process.exchange", exchange)
    me = psutil.Process()

    async def give_up():
        model = SimpleNamespace(config=ModelConfig())
        before, reader = set(me.children()), Decoder(1 << 20, 1 << 20)
        reading = asyncio.ensure_future(reader.read_generate(LongBody((b"{}",)), lambda: model))
        await asyncio.to_thread(answered.wait)
        reading.cancel()
        await asyncio.wait((reading,))
        deadline = time.monotonic() + 120
        while set(me.children()) - before and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        left = set(me.children()) - before
        go_on.set()
        return left

    assert not asyncio.run(give_up())


def test_a_killed_decoding_process_fails_only_its_request(fresh_server):
    me = psutil.Process()
    before = set(me.children())
    answers = []
    body = BODIES["parameters"][1]
    asking = threading.Thread(
        target=lambda: answers.append(fresh_server.post("/v2/models/echo/infer", body))
    )
    asking.start()
    fresh_server.wait_until(lambda: set(me.children()) - before)
    for process in set(me.children()) - before:
        process.kill()
    asking.join()
    assert (answers[0].status, answers[0].error) == (
        503,
        "the process that read the request's JSON ended",
    )
    small = INFER % (b"INT8", b"INT8", 200_000, (b"1," * 200_000)[:-1])
    assert fresh_server.post("/v2/models/echo/infer", small).status == 200
