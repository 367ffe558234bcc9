"""Clients that send too much or too little, read slowly or leave, against the real server."""

import json
import socket

import pytest
from waiting import wait_until

STREAM = "/v2/models/ensemble/generate_stream"
PROMPT = {"text_input": "It was a dark and", "max_tokens": 24, "stream": True}


def text_of(server):
    return "".join(event["text_output"] for event in server.events(STREAM, PROMPT))


def send(server, path, body, length=None, window=None):
    sock = socket.socket()
    if window is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    sock.settimeout(60)
    sock.connect(("127.0.0.1", server.http_port))
    length = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def wait_until_idle(server):
    """Wait until the engine has no request and no KV block in use."""

    def in_use():
        labels = {"model": "tensorrt_llm"}
        return server.metric(
            "nv_trt_llm_request_metrics", request_type="active", **labels
        ) + server.metric(
            "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used", **labels
        )

    wait_until(lambda: in_use() == 0, "an idle engine", told=lambda: f"{in_use()} in use")


@pytest.fixture(scope="module")
def undisturbed(decoupled_server):
    return text_of(decoupled_server)


def test_a_body_of_100_megabytes_is_refused_and_disturbs_no_request(
    decoupled_server, undisturbed
):
    body = {"text_input": "x" * 100_000_000, "max_tokens": 1}
    status, answer = decoupled_server.post("/v2/models/ensemble/generate", body)
    assert status == 400
    assert "exceeds the maximum allowed input size of 67108864 bytes" in answer["error"]
    assert text_of(decoupled_server) == undisturbed


def test_a_truncated_request_runs_nothing_and_disturbs_no_request(
    decoupled_server, undisturbed
):
    before = decoupled_server.metric("nv_inference_exec_count", model="ensemble")
    body = json.dumps(PROMPT).encode()
    with send(decoupled_server, STREAM, body[:20], len(body)) as waiting:
        with send(decoupled_server, STREAM, body[:20], len(body)) as leaving:
            leaving.shutdown(socket.SHUT_WR)
            assert leaving.recv(1) == b""
        assert text_of(decoupled_server) == undisturbed
        assert decoupled_server.is_ready()
        waiting.sendall(body[20:])
        assert waiting.recv(15) == b"HTTP/1.1 200 OK"
    after = decoupled_server.metric("nv_inference_exec_count", model="ensemble")
    assert after - before <= 2


def test_slow_readers_delay_no_other_request(decoupled_server, undisturbed):
    body = json.dumps({**PROMPT, "max_tokens": 800, "end_id": -1}).encode()
    readers = [send(decoupled_server, STREAM, body, window=2048) for _ in range(8)]
    try:
        assert text_of(decoupled_server) == undisturbed
        # Throttled output is complete after the read.
        for reader in readers:
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received += reader.recv(1 << 16)
            assert received.startswith(b"HTTP/1.1 200 OK")
    finally:
        for reader in readers:
            reader.close()
    wait_until_idle(decoupled_server)


@pytest.mark.parametrize("num_bytes_read", [0, 100])
def test_a_disconnected_client_frees_the_resources_of_its_request(
    decoupled_server, num_bytes_read
):
    body = json.dumps({**PROMPT, "max_tokens": 900, "end_id": -1}).encode()
    sock = send(decoupled_server, STREAM, body)
    if num_bytes_read:
        assert sock.recv(num_bytes_read).startswith(b"HTTP/1.1 200")
    sock.close()
    wait_until_idle(decoupled_server)
