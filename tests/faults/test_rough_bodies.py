"""Expensive bodies and messages, sent to a server with the default flags.

Each test sends one or several bad requests beside a long greedy stream and a health probe,
which must not be disturbed.
"""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from bystanders import Watched
from served import DEMO_MODEL, Served, init_repo, run_trimaran
from tritonclient.grpc import service_pb2 as pb

pytestmark = pytest.mark.timeout(120)

MAX_GAP_S = 1.0
MAX_GROWTH_MB = 200.0
NEARLY_ALL = (48 << 20) - 1000
"""Nearly the longest JSON and the longest message."""

GENERATE = "/v2/models/ensemble/generate"
INFER = "/v2/models/preprocessing/infer"
SERVICE = "/inference.GRPCInferenceService/"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("bodies")
    engine = folder / "engine"
    done = run_trimaran("build", "--checkpoint", str(DEMO_MODEL), "--output", str(engine))
    assert done.returncode == 0, done.stderr
    fill = f"tokenizer_dir:{DEMO_MODEL},engine_dir:{engine},decoupled_mode:True"
    init_repo(str(folder / "models"), "--defaults", "--fill", fill)
    # Other servers refuse long requests to load before these are decoded.
    flags = ("--model-control-mode", "explicit", "--load-model", "*")
    with Served(folder / "models", flags=flags, log_path=folder / "serve.log") as served:
        # The helper processes are there before memory is looked at.
        with ThreadPoolExecutor(2) as clients:
            list(clients.map(lambda _: _post(served, GENERATE, b" " * (1 << 20)), range(2)))
        yield served


def _post(
    server: Served, path: str, body: bytes, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=100)
    connection.request("POST", path, body, headers or {})
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, text


def _call(server: Served, method: str, raw: bytes) -> tuple[str, str]:
    """The status of a call with these bytes as its message."""
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options) as channel:
        try:
            channel.unary_unary(SERVICE + method)(raw, timeout=100)
        except grpc.RpcError as error:
            return error.code().name, error.details()
    return "OK", ""


def _repeated(item: bytes, num_bytes: int = NEARLY_ALL) -> bytes:
    return item * (num_bytes // len(item))


def _named(model: str) -> bytes:
    return bytes(pb.ModelInferRequest(model_name=model).SerializeToString())


def _delimited(number: int, payload: bytes) -> bytes:
    size, raw = len(payload), bytearray([number << 3 | 2])
    while size > 0x7F:
        raw.append(size & 0x7F | 0x80)
        size >>= 7
    raw.append(size)
    return bytes(raw) + payload


def _strings(num_bytes: int) -> bytes:
    """A message with a single input of empty strings."""
    contents = _delimited(5, _repeated(b"\x42\x00", num_bytes))
    head = b"\x0a\x05QUERY\x12\x05BYTES\x1a\x02\x01\x01"
    return _named("preprocessing") + _delimited(5, head + contents)


def _check(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    seen = watched.seen
    with capsys.disabled():
        print(f"\n  {seen}")
    assert seen.failure == ""
    assert seen.num_events > 5
    assert seen.stream_gap_s < MAX_GAP_S
    assert seen.health_s < MAX_GAP_S
    assert seen.grown_mb < MAX_GROWTH_MB


MESSAGES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "inputs for no model": (
        "ModelInfer", lambda: _named("none") + _repeated(b"\x2a\x00"), "NOT_FOUND"
    ),
    "inputs": (
        "ModelInfer", lambda: _named("preprocessing") + _repeated(b"\x2a\x00"),
        "INVALID_ARGUMENT",
    ),
    "over the limit": (
        "ModelInfer", lambda: _named("none") + _repeated(b"\x2a\x00", 140 << 20),
        "RESOURCE_EXHAUSTED",
    ),
    "parameters": (
        "ModelInfer", lambda: _named("preprocessing") + _repeated(b"\x22\x00"),
        "INVALID_ARGUMENT",
    ),
    "empty strings": ("ModelInfer", lambda: _strings(12 << 20), "INVALID_ARGUMENT"),
    "more empty strings": ("ModelInfer", lambda: _strings(NEARLY_ALL), "INVALID_ARGUMENT"),
    "files": (
        "RepositoryModelLoad", lambda: b"\x12\x01a" + _repeated(b"\x1a\x00"), "INVALID_ARGUMENT"
    ),
    "settings": ("LogSettings", lambda: _repeated(b"\x0a\x00"), "INVALID_ARGUMENT"),
    "no message": ("ModelInfer", lambda: _repeated(b"\xff"), "INTERNAL"),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_with_millions_of_fields_slow_down_no_other_request(server, name, capsys):
    method, make, code = MESSAGES[name]
    raw = make()
    with _watched(server) as watched:
        found = _call(server, method, raw)
    assert found[0] == code, found
    _check(watched, capsys)


def _watched(server: Served) -> Watched:
    return Watched(server.http_port, server.process.pid)


_NESTED = b'{"inputs":[{"name":"QUERY","datatype":"BYTES","shape":[1,1],"data":[%b0]}]}'

BODIES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "logging": ("/v2/logging", lambda: _repeated(b"[],"), "this route takes at most 65536"),
    "trace": ("/v2/trace/setting", lambda: _repeated(b"[],"), "takes at most 65536"),
    "index": ("/v2/repository/index", lambda: _repeated(b"[],"), "takes at most 65536"),
    "unload": (
        "/v2/repository/models/ensemble/unload", lambda: _repeated(b"[],"),
        "takes at most 65536",
    ),
    "load": (
        "/v2/repository/models/ensemble/load", lambda: _repeated(b"[],"),
        "a request has at most 1048576 values",
    ),
    "lists": (INFER, lambda: _NESTED % _repeated(b"[],", NEARLY_ALL - 1000), "at most 1048576"),
    "objects": (
        GENERATE, lambda: b'{"text_input":[%b0]}' % _repeated(b"{},", NEARLY_ALL - 1000),
        "at most 262144 JSON objects",
    ),
    "members": (
        GENERATE, lambda: b'{"text_input":"a",%b"":1}' % _repeated(b'"x":1,', 12 << 20), "",
    ),
    "id": (
        GENERATE,
        lambda: b'{"text_input":"a","max_tokens":1,"id":"%b"}' % _repeated(b"x", 44 << 20),
        "the request's id has",
    ),
    "brackets": (GENERATE, lambda: _repeated(b"["), "at most 1048576 values"),
    "a text of commas and colons": (
        GENERATE,
        lambda: b'{"text_input":"%b"}' % _repeated(b"a:,{[", NEARLY_ALL - 1000),
        "at most",
    ),
    "escaped quotes of a text without an end": (
        GENERATE,
        lambda: b'{"text_input":"%b' % _repeated(b'\\"a:{,', NEARLY_ALL - 1000),
        "Missing a closing quotation mark in string",
    ),
    "text that is no JSON": (GENERATE, lambda: _repeated(b"x"), "failed to parse"),
    "JSON over its part of a body": (
        GENERATE, lambda: _repeated(b"x", 64 << 20), "the JSON of a request may have 50331648"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_bodies_with_millions_of_values_slow_down_no_other_request(server, name, capsys):
    path, make, error = BODIES[name]
    body = make()
    with _watched(server) as watched:
        status, text = _post(server, path, body)
    assert status >= 400
    assert error in text, text[:300]
    _check(watched, capsys)


def test_compressed_bodies_that_expand_beyond_the_limit_are_refused(server, capsys):
    packed = gzip.compress(b" " * (800 << 20), 6)
    headers = {"Content-Encoding": "gzip", "Inference-Header-Content-Length": "100"}
    with _watched(server) as watched, ThreadPoolExecutor(3) as clients:
        asked = [clients.submit(_post, server, INFER, packed, headers) for _ in range(3)]
        answers = [each.result() for each in asked]
    for status, text in answers:
        assert status in (400, 503)
        assert "Decompressed data size exceeds" in text or "--http-max-pending-size" in text
    _check(watched, capsys)


def test_many_long_bodies_at_once_are_refused_or_read_in_turn(server, capsys):
    body = json.dumps({"text_input": "a " * (8 << 20)}).encode()
    with _watched(server) as watched, ThreadPoolExecutor(20) as clients:
        answers = list(clients.map(lambda _: _post(server, GENERATE, body), range(20)))
    assert {status for status, _ in answers} <= {400, 503}
    seen = watched.seen
    with capsys.disabled():
        print(f"\n  {seen}")
    assert seen.failure == ""
    assert seen.stream_gap_s < MAX_GAP_S and seen.health_s < MAX_GAP_S


def test_thousands_of_requests_in_one_packet_are_answered_in_turn(server, capsys):
    count = 20_000
    request = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    with _watched(server) as watched:
        with socket.create_connection(("127.0.0.1", server.http_port), timeout=100) as sock:
            with ThreadPoolExecutor(1) as writer:
                writing = writer.submit(sock.sendall, request * count)
                num_answers, rest = 0, b""
                while num_answers < count:
                    part = sock.recv(1 << 16)
                    assert part
                    rest += part
                    num_answers += rest.count(b"HTTP/1.1 200")
                    rest = rest[-11:]
                writing.result()
    _check(watched, capsys)


def test_thousands_of_messages_on_one_stream_are_answered_in_turn(server, capsys):
    count = 20_000
    message = pb.ModelInferRequest(model_name="none", id="x")
    with _watched(server) as watched:
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            call = channel.stream_stream(
                SERVICE + "ModelStreamInfer",
                request_serializer=pb.ModelInferRequest.SerializeToString,
            )
            answers = sum(1 for _ in call(message for _ in range(count)))
    assert answers == count
    _check(watched, capsys)
