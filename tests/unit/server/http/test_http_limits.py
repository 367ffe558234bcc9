"""Clients that misbehave, or are slow, or go away."""

import gzip
import http.client
import json
import socket

import pytest

from trimaran.server.decoding.pending import _SHORT_BYTES
from trimaran.server.http.connections import MAX_NUM_HEADERS

LIMIT = 64 << 20


def open_socket(server):
    return socket.create_connection(("127.0.0.1", server.http_port), timeout=60)


def post_head(path, body=b"", length=None):
    length = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
    return head.encode() + body


def generate_body(**members):
    return json.dumps({"text_input": "a", **members}).encode()


def read_all(sock):
    parts = []
    while part := sock.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("action", ["infer", "generate", "generate_stream"])
def test_a_body_of_100_megabytes_is_refused_and_the_connection_stays_open(server, action):
    size = 100 * 1000 * 1000
    model = "double" if action == "infer" else "repeat"
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.request("POST", f"/v2/models/{model}/{action}", b" " * size)
    response = connection.getresponse()
    assert response.status == 400
    assert json.loads(response.read())["error"] == (
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {LIMIT} "
        "bytes. Use --http-max-input-size to increase the limit."
    )
    connection.request("GET", "/v2/health/live")
    assert connection.getresponse().status == 200
    connection.close()


def test_a_chunked_body_is_refused_when_it_passes_the_limit(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    chunk = b" " * (1 << 20)
    body = (chunk for _ in range(66))
    connection.request(
        "POST", "/v2/models/repeat/generate", body, {"Transfer-Encoding": "chunked"},
        encode_chunked=True,
    )  # fmt: skip
    response = connection.getresponse()
    assert response.status == 400
    assert b"exceeds the maximum allowed input size" in response.read()
    connection.close()


def test_a_chunked_body_is_accepted(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    body = generate_body(max_tokens=1)
    connection.request(
        "POST", "/v2/models/repeat/generate", iter([body[:7], body[7:]]),
        {"Transfer-Encoding": "chunked"}, encode_chunked=True,
    )  # fmt: skip
    assert json.loads(connection.getresponse().read())["text_output"] == "a 0"
    connection.close()


def test_a_json_tensor_over_the_limit_is_refused(server):
    tensor = {"name": "FP32", "shape": [(LIMIT >> 2) + 1], "datatype": "FP32", "data": []}
    answer = server.post("/v2/models/echo/infer", {"inputs": [tensor]})
    assert (answer.status, answer.error) == (
        400,
        f"JSON input 'FP32' has a byte_size ({LIMIT + 4}) that exceeds the maximum allowed "
        f"value of {LIMIT} bytes. Use --http-max-input-size to increase the limit.",
    )


def blob_body(size):
    tensor = {"name": "INT8", "shape": [size], "datatype": "INT8",
              "parameters": {"binary_data_size": size}}  # fmt: skip
    head = json.dumps({"inputs": [tensor], "outputs": [{"name": "OUT_TEXT"}]}).encode()
    return head + bytes(size), {"Inference-Header-Content-Length": str(len(head))}


def test_binary_data_counts_towards_the_limit_of_the_body(server):
    answer = server.post("/v2/models/echo/infer", *blob_body(60 << 20))
    assert answer.json["outputs"] == []
    body, headers = blob_body(LIMIT)
    answer = server.post("/v2/models/echo/infer", body, headers)
    assert (answer.status, answer.error) == (
        400,
        f"request JSON size of {len(body)} bytes exceeds the maximum allowed input size of "
        f"{LIMIT} bytes. Use --http-max-input-size to increase the limit.",
    )


def test_the_limit_applies_to_decompressed_bodies_regardless_of_headers(server):
    packed = gzip.compress(bytes(2 * LIMIT))
    for length in ({}, {"Inference-Header-Content-Length": "100"}):
        headers = {"Content-Encoding": "gzip", **length}
        answer = server.post("/v2/models/echo/infer", packed, headers)
        assert (answer.status, answer.error) == (
            400,
            f"Decompressed data size exceeds the maximum allowed value of {LIMIT} bytes. "
            "Use --http-max-input-size to increase the limit.",
        )


@pytest.mark.parametrize(
    "path", ["logging", "trace/setting", "repository/index", "repository/models/double/unload"]
)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_routes_with_small_bodies_refuse_large_bodies(server, path, is_chunked):
    body = b"[]," * 30_000
    sent = iter([body[:40_000], body[40_000:]]) if is_chunked else body
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.request("POST", f"/v2/{path}", sent, encode_chunked=is_chunked, headers=(
        {"Transfer-Encoding": "chunked"} if is_chunked else {}
    ))  # fmt: skip
    response = connection.getresponse()
    assert response.status == 400
    assert "this route takes at most 65536" in json.loads(response.read())["error"]
    connection.close()


def test_bodies_that_wait_for_decoding_share_a_limit(fresh_server):
    limit = fresh_server.service.config.http_max_pending_bytes
    path, size = "/v2/models/repeat/generate", LIMIT
    opened = []
    try:
        for _ in range(limit // size):
            opened.append(sock := open_socket(fresh_server))
            sock.sendall(post_head(path, b" " * (size - 1), size))
        # All of them have come: a body still under way would be refused in place of the next.
        come = len(opened) * (size - 1 - _SHORT_BYTES)
        fresh_server.wait_until(lambda: fresh_server.http._pending._num_bytes == come)
        refused = fresh_server.post(path, b" " * (8 << 20))
        assert refused.status == 503
        assert "--http-max-pending-size" in refused.error
        assert fresh_server.post(path, generate_body(max_tokens=1)).status == 200
    finally:
        for sock in opened:
            sock.close()
    fresh_server.wait_until(lambda: fresh_server.http._pending._num_bytes == 0)
    long = json.dumps({"text_input": "a" * (4 << 20), "max_tokens": 1}).encode()
    assert fresh_server.post(path, long).status == 200


def test_request_ids_have_a_length_limit(server):
    body = generate_body(id="x" * 5000, max_tokens=1)
    answer = server.post("/v2/models/repeat/generate", body)
    assert (answer.status, answer.error) == (
        400,
        "the request's id has 5000 bytes, and at most 4096 are allowed. Send a shorter one.",
    )


def test_deep_nesting_is_refused(server):
    for body in (b"[" * 200_000, b'{"text_input":' + b"[" * 5000 + b"]" * 5000 + b"}"):
        answer = server.post("/v2/models/repeat/generate", body)
        assert answer.status in (400, 500)
        assert "deeper than 100 levels" in answer.error


def test_expect_100_continue_is_answered_before_the_body_is_sent(server):
    body = generate_body(max_tokens=1)
    with open_socket(server) as sock:
        sock.sendall(
            b"POST /v2/models/repeat/generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        assert sock.recv(64) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert b'"text_output":"a 0"' in read_all(sock)


def test_a_truncated_request_runs_nothing_and_delays_no_request(fresh_server):
    server = fresh_server
    body = generate_body(max_tokens=1)
    with open_socket(server) as waiting, open_socket(server) as leaving:
        waiting.sendall(post_head("/v2/models/repeat/generate", body[:5], len(body)))
        leaving.sendall(post_head("/v2/models/repeat/generate", body[:5], len(body)))
        leaving.shutdown(socket.SHUT_WR)
        assert read_all(leaving) == b""
        answer = server.post("/v2/models/repeat/generate", body)
        assert answer.json["text_output"] == "a 0"
    assert server.repeat.num_responses == 1


def test_invalid_http_disturbs_no_request(server):
    with open_socket(server) as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        read_all(sock)
    assert server.get("/v2/health/live").status == 200


@pytest.mark.parametrize("action", ["generate", "generate_stream"])
def test_a_disconnect_before_the_first_byte_cancels_the_request(fresh_server, action):
    server = fresh_server
    body = generate_body(max_tokens=1, delay_ms=3_600_000)
    with open_socket(server) as sock:
        sock.sendall(post_head(f"/v2/models/repeat/{action}", body))
        server.wait_until(lambda: server.repeat.num_running == 1)
    server.wait_until(lambda: server.repeat.num_running == 0)
    assert server.repeat.num_ended_early == 1
    found = server.get("/v2/models/repeat/stats").json["model_stats"][0]["inference_stats"]
    assert found["fail"]["count"] == 1


def test_a_disconnect_within_a_stream_cancels_the_request(fresh_server):
    server = fresh_server
    body = generate_body(max_tokens=1_000_000, delay_ms=1)
    with open_socket(server) as sock:
        sock.sendall(post_head("/v2/models/repeat/generate_stream", body))
        assert sock.recv(64).startswith(b"HTTP/1.1 200")
    server.wait_until(lambda: server.repeat.num_running == 0)
    assert server.repeat.num_ended_early == 1


def test_a_slow_reader_is_throttled_and_delays_no_other_request(fresh_server):
    server = fresh_server
    with socket.socket() as sock:
        # A small window, so that the server's writes soon stand still.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.http_port))
        body = generate_body(text_input="x" * 1000, max_tokens=100_000)
        sock.sendall(post_head("/v2/models/repeat/generate_stream", body))
        server.wait_until(lambda: server.repeat.num_responses > 100)
        seen = -1
        while seen != server.repeat.num_responses:
            seen = server.repeat.num_responses
            quick = server.post("/v2/models/double/generate", {"X": [1, 2]})
            assert quick.json["Y"] == [2, 4]
        # Far from all: unread responses are not made.
        assert server.repeat.num_responses < 20_000
        assert server.repeat.num_running == 1
        sock.recv(100)
    server.wait_until(lambda: server.repeat.num_running == 0)


def test_an_http_1_0_client_reads_a_stream_to_its_end(server):
    body = generate_body(max_tokens=3)
    with open_socket(server) as sock:
        head = post_head("/v2/models/repeat/generate_stream", body)
        sock.sendall(head.replace(b"HTTP/1.1", b"HTTP/1.0"))
        response = read_all(sock)
    assert b"chunked" not in response
    assert response.partition(b"\r\n\r\n")[2].count(b"data: {") == 3


def test_pipelined_requests_are_answered_in_order(server):
    path = "/v2/models/repeat/generate"
    slow = generate_body(text_input="slow", max_tokens=1, delay_ms=50)
    fast = generate_body(text_input="fast", max_tokens=1)
    with open_socket(server) as sock:
        sock.sendall(post_head(path, slow) + post_head(path, fast))
        response = b""
        while b"fast 0" not in response:
            response += sock.recv(1 << 16)
    assert response.index(b"slow 0") < response.index(b"fast 0")


def test_a_disconnect_cancels_an_infer_request(fresh_server):
    server = fresh_server
    server.repeat.is_decoupled = False
    tensors = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [1]},
        {"name": "delay_ms", "datatype": "INT32", "shape": [1, 1], "data": [3_600_000]},
    ]
    body = json.dumps({"inputs": tensors}).encode()
    with open_socket(server) as sock:
        sock.sendall(post_head("/v2/models/repeat/infer", body))
        server.wait_until(lambda: server.repeat.num_running == 1)
    server.wait_until(lambda: server.repeat.num_running == 0)
    assert server.repeat.num_ended_early == 1


def test_one_connection_serves_many_requests(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    for n in range(20):
        connection.request("POST", "/v2/models/repeat/generate_stream",
                           generate_body(max_tokens=n))  # fmt: skip
        assert connection.getresponse().read().count(b"data: ") == n
        connection.request("GET", "/v2/nothing")
        assert connection.getresponse().read() == b'{"error":"Not Found"}'
    connection.close()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (
            b"GET /v2 HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
            "Invalid character in Content-Length",
        ),
        (b"GET /v2 HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", "Got more than"),
    ],
)
def test_invalid_http_is_a_log_line_without_traceback(server, caplog, sent, reason):
    with caplog.at_level("INFO"), open_socket(server) as sock:
        sock.sendall(sent)
        assert b"400 Bad Request" in read_all(sock)
    (record,) = [r for r in caplog.records if r.name == "trimaran.server.http.connections"]
    assert record.levelname == "INFO"
    assert record.exc_info is None
    assert record.getMessage().startswith(f"127.0.0.1 sent no valid HTTP request: {reason}")
    assert len(record.getMessage()) < 250


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"\x16\x03\x01 no HTTP", "HTTPS traffic on an HTTP port"),
        (b"GET /v2 HTTP/1.1\r\n\r\n", "Missing 'Host' header"),
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 70_000, "65536"),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", "Content-Length"),
    ],
)
def test_invalid_http_is_answered_with_an_error_body(server, head, reason):
    with open_socket(server) as sock:
        sock.sendall(head + b"\r\n\r\n")
        answer, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert b" 400 " in answer.partition(b"\r\n")[0]
    assert b"application/json" in answer
    assert reason in json.loads(body)["error"]


@pytest.mark.parametrize(
    "path", ["/v2/models/double/infer", "/v2/models/repeat/generate_stream", "/v2/nothing"]
)
def test_a_body_that_breaks_the_http_framing_is_answered_and_the_connection_closed(
    server, caplog, path
):
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with caplog.at_level("INFO"), open_socket(server) as sock:
        sock.settimeout(5)
        sock.sendall(head.encode() + b"5\r\nhello\r\n")
        # The handler has begun when the rest comes.
        assert server.get("/v2/health/live").status == 200
        sock.sendall(b"zz\r\n" + b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 ") == 1
    if path != "/v2/nothing":
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"Invalid character in chunk size" in answer
    assert not [r for r in caplog.records if r.exc_info or r.levelname == "ERROR"]


@pytest.mark.parametrize(("count", "status"), [(MAX_NUM_HEADERS, 200), (129, 400)])
def test_a_request_has_as_many_headers_as_documented(server, count, status):
    # One of the headers is the Host header.
    lines = [b"GET /v2/health/live HTTP/1.1", b"Host: x", *[b"X: y"] * (count - 1), b"\r\n"]
    with open_socket(server) as sock:
        sock.sendall(b"\r\n".join(lines))
        assert sock.recv(100).split()[1] == str(status).encode()


def test_a_header_of_60_kilobytes_is_accepted(server):
    headers = {"Authorization": "Bearer " + "x" * 60_000}
    assert server.request("GET", "/v2/health/live", None, headers).status == 200
