"""Connections that send nothing, or too slowly, or read nothing, and ports that are full."""

from __future__ import annotations

import gc
import http.client
import json
import socket
import time

import pytest
import tritonclient.http as httpclient

from tests.unit.server.conftest import RunningServer
from trimaran.server.access.config import ConnectionLimits
from trimaran.server.http.connections import _Connection

SOON_S = 0.2
LATE_S = 3600.0
BODY = b'{"text_input": "a", "max_tokens": 1}'
GENERATE = b"POST /v2/models/repeat/generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture
def start():
    """Start a server with the given deadlines; other deadlines are distant."""
    servers = []

    def run(**limits):
        far = dict.fromkeys(
            ("header_timeout_s", "body_timeout_s", "send_timeout_s", "idle_timeout_s"), LATE_S
        )
        servers.append(RunningServer(http_limits=ConnectionLimits(**{**far, **limits})))
        return servers[-1]

    yield run
    for server in servers:
        server.close()


def connect(server):
    return socket.create_connection(("127.0.0.1", server.http_port), timeout=60)


def read_all(sock):
    parts = []
    while part := sock.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def error_of(answer):
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def test_a_silent_connection_is_closed(start):
    server = start(header_timeout_s=SOON_S)
    with connect(server) as sock:
        assert read_all(sock) == b""


@pytest.mark.parametrize("is_later", [False, True])
def test_an_incomplete_request_head_is_answered_and_closed(start, is_later):
    server = start(header_timeout_s=SOON_S)
    with connect(server) as sock:
        if is_later:
            sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in sock.recv(1 << 16)
        sock.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\nX-Slow")
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert error_of(answer) == "the head took longer than 0.2 s (--http-header-timeout)"


def test_bytes_of_a_request_head_do_not_extend_its_deadline(start):
    server = start(header_timeout_s=SOON_S)
    with connect(server) as sock, pytest.raises(OSError):
        sock.sendall(b"GET /v2 HTTP/1.1\r\n")
        while True:
            sock.sendall(b"X: y\r\n")
            time.sleep(0.01)


def test_a_request_head_in_many_parts_has_a_size_limit(start):
    server = start()
    line = b"X: " + b"y" * 60_000 + b"\r\n"
    with connect(server) as sock:
        sock.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n")
        try:
            for _ in range(8):
                sock.sendall(line)
            answer = sock.recv(1 << 16)
        except ConnectionError:
            # The server closed the connection while lines were still on their way.
            return
    assert b" 431 " in answer or b" 400 " in answer


@pytest.mark.parametrize("action", ["infer", "generate", "generate_stream"])
def test_a_body_that_stalls_is_answered_and_closed(start, action):
    server = start(body_timeout_s=SOON_S)
    head = GENERATE.replace(b"generate", action.encode()) % 1000
    if action == "infer":
        head = head.replace(b"repeat", b"echo")
    with connect(server) as sock:
        sock.sendall(head + BODY)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert "of the body arrived for 0.2 s (--http-body-timeout" in error_of(answer)
    assert b"close" in answer.lower()


def test_a_slow_body_is_accepted(start):
    server = start(body_timeout_s=SOON_S, min_rate=10)
    with connect(server) as sock:
        sock.sendall(GENERATE % (len(BODY) + 40))
        for _ in range(40):
            sock.sendall(b" ")
            time.sleep(0.02)
        sock.sendall(BODY)
        assert b'"text_output":"a 0"' in sock.recv(1 << 16)


def test_a_request_that_computes_for_long_has_no_deadline(start):
    server = start(header_timeout_s=SOON_S, body_timeout_s=SOON_S, idle_timeout_s=SOON_S)
    body = json.dumps({"text_input": "a", "max_tokens": 1, "delay_ms": 1000}).encode()
    with connect(server) as sock:
        head = GENERATE % len(body)
        # Sent in parts, so that both deadlines have begun.
        for part in (head[:10], head[10:], body[:5], body[5:], b"GET /v2"):
            sock.sendall(part)
            time.sleep(0.02)
        assert b'"text_output":"a 0"' in sock.recv(1 << 16)
        assert b" 408 " in read_all(sock)


def test_an_idle_connection_is_closed_and_a_client_opens_another(start):
    server = start(idle_timeout_s=SOON_S)
    with connect(server) as sock:
        sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 200 ")
    with httpclient.InferenceServerClient(server.http_url) as client:
        for _ in range(3):
            assert client.is_server_live()
            time.sleep(2 * SOON_S)


def test_a_stream_that_is_not_read_is_dropped_and_its_request_cancelled(start):
    server = start(send_timeout_s=SOON_S)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.http_port))
        body = json.dumps({"text_input": "x" * 1000, "max_tokens": 100_000}).encode()
        head = GENERATE.replace(b"generate", b"generate_stream") % len(body)
        sock.sendall(head + body)
        server.wait_until(lambda: server.repeat.num_ended_early == 1)
        # The buffers of the two sockets hold some thousand events.
        assert server.repeat.num_responses < 20_000
        assert server.post("/v2/models/double/generate", {"X": [1, 2]}).json["Y"] == [2, 4]


def test_a_slowly_read_stream_continues(start):
    # The stream takes several deadlines; each pause is far below the deadline.
    server = start(send_timeout_s=1.0, min_rate=1000)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", server.http_port))
        body = json.dumps({"text_input": "x" * 1000, "max_tokens": 1500}).encode()
        head = GENERATE.replace(b"generate", b"generate_stream") % len(body)
        sock.sendall(head + body)
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            part = sock.recv(1 << 16)
            assert part
            answer += part
            time.sleep(0.004)
    assert answer.count(b"data: {") == 1500


def test_a_full_port_closes_idle_connections_and_refuses_others(start):
    server = start(max_connections=4)
    kept = []
    for _ in range(4):
        kept.append(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60))
        kept[-1].connect()
    server.wait_until(lambda: len(server.http._server.connections) == 4)
    with connect(server) as sock:
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After" in answer
    assert "4 open connections, which is its limit" in error_of(answer)
    # A connection that waits for its next request gives way; one without any does not.
    kept[0].request("GET", "/v2/health/live")
    assert kept[0].getresponse().read() == b""
    server.wait_until(lambda: is_served(server))
    with pytest.raises((OSError, http.client.HTTPException)):
        kept[0].request("GET", "/v2/health/live")
        kept[0].getresponse()
    for connection in kept:
        connection.close()


def is_served(server):
    try:
        return server.get("/v2/health/live").status == 200
    except (OSError, http.client.HTTPException):
        # Refused and closed before the request was sent.
        return False


def test_the_metrics_port_has_the_same_deadlines(start):
    server = start(header_timeout_s=SOON_S)
    port = int(server.metrics_url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        assert read_all(sock) == b""


def test_a_closed_connection_and_its_body_need_no_garbage_collection(start):
    server = start()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with connect(server) as sock:
                sock.sendall(GENERATE % len(BODY) + BODY + GENERATE % 1000 + b'{"text_input"')
                assert b" 200 " in sock.recv(1 << 16)
        deadline = time.monotonic() + 20
        while any(isinstance(each, _Connection) for each in gc.get_objects()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        gc.enable()
