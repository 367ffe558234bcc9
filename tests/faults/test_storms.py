"""Many connections, requests and cancellations at once, beside a stream that is checked."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))

from campaign import Campaign, together
from run import demo_server, target_of
from served import Served
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from waiting import wait_until

pytestmark = pytest.mark.timeout(300)

NUM_IDLE = 5000
NUM_TINY = int(os.environ.get("TINY_REQUESTS", "100000"))
"""A million of them take ten times as long."""
STORM_S = 20.0
NUM_UNREAD = 40
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
STREAM = "/v2/models/ensemble/generate_stream"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo model on two ranks with the default flags."""
    with demo_server(tmp_path_factory.mktemp("storms")) as served:
        yield served


def check_beside(server: Served, folder: Path, act: Callable[[], object]) -> None:
    """Run an action beside the watch, which notices nothing."""
    campaign = Campaign(target_of(server), folder)
    campaign.beside_watch(act)
    campaign.check_log()
    print(json.dumps(campaign.seen))
    assert campaign.violations == []
    assert campaign.seen["events"] > 20


def connect(server: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.http_port), timeout=30)


def stream_request(num_tokens: int) -> bytes:
    body = {"text_input": "Once upon a", "max_tokens": num_tokens, "end_id": -1, "stream": True}
    raw = json.dumps(body).encode()
    head = f"POST {STREAM} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def is_idle(server: Served) -> bool:
    """Whether no request is left in the engine."""
    requests = server.samples("nv_trt_llm_request_metrics")
    blocks = server.samples("nv_trt_llm_kv_cache_block_metrics")
    num_used = sum(v for labels, v in blocks if labels["kv_cache_block_type"] == "used")
    return not num_used and not any(
        value for labels, value in requests if labels["request_type"] in ("active", "waiting")
    )


@pytest.fixture(autouse=True)
def nothing_stays(server: Served) -> Iterator[None]:
    """Requests of disconnected clients end in the engine and in the front end."""
    yield
    server.wait_until(lambda: is_idle(server), "an idle engine", 30)
    front_ends = [
        process
        for process in psutil.Process(server.process.pid).children(recursive=True)
        if "trimaran-frontend" in " ".join(process.cmdline())
    ]
    wait_until(lambda: all(p.num_fds() < 200 for p in front_ends), "connections closed", 30)


def test_thousands_of_idle_connections_delay_no_request(server, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            socks = [stack.enter_context(connect(server)) for _ in range(NUM_IDLE)]
            time.sleep(5)
            # Each of them is served when its client wakes up.
            for sock in socks[:: NUM_IDLE // 500]:
                sock.sendall(LIVE)
                assert sock.recv(1000).startswith(b"HTTP/1.1 200")

    try:
        check_beside(server, tmp_path, hold)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_thousands_of_cancellations_leave_nothing_behind(server, tmp_path):
    end_s = []

    def http_client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end_s[0]:
            with connect(server) as sock:
                sock.sendall(stream_request(700))
                if rng.random() < 0.5:
                    sock.recv(rng.choice((1, 100, 5000)))
                time.sleep(rng.choice((0.0, 0.0, 0.05)))

    def grpc_client(number: int) -> None:
        rng = random.Random(number)
        request = pb.ModelInferRequest(model_name="ensemble")
        for name, datatype, raw in (
            ("text_input", "BYTES", b"\4\0\0\0Once"), ("max_tokens", "INT32", b"\xbc\2\0\0"),
            ("stream", "BOOL", b"\1"),
        ):  # fmt: skip
            request.inputs.add(name=name, datatype=datatype, shape=[1, 1])
            request.raw_input_contents.append(raw)
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while time.monotonic() < end_s[0]:
                call = stub.ModelStreamInfer(iter([request] * rng.choice((1, 1, 5))))
                if rng.random() < 0.5:
                    assert not next(call).error_message
                call.cancel()

    def storm() -> None:
        end_s.append(time.monotonic() + STORM_S)
        clients = [partial(http_client, number) for number in range(8)]
        together([*clients, *(partial(grpc_client, number) for number in range(4))])

    check_beside(server, tmp_path, storm)


def test_unread_streams_delay_no_request(server, tmp_path):
    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(NUM_UNREAD):
                sock = stack.enter_context(socket.socket())
                # Little room for what is not read.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect(("127.0.0.1", server.http_port))
                sock.sendall(stream_request(700))
            time.sleep(STORM_S)

    check_beside(server, tmp_path, hold)


def test_a_hundred_thousand_tiny_requests_delay_no_other_request(server, tmp_path):
    num_clients, at_once = 8, 50

    def client() -> None:
        with connect(server) as sock:
            for _ in range(NUM_TINY // num_clients // at_once):
                sock.sendall(LIVE * at_once)
                num_answers, rest = 0, b""
                while num_answers < at_once:
                    part = sock.recv(1 << 16)
                    assert part
                    rest += part
                    num_answers += rest.count(b"HTTP/1.1 200")
                    rest = rest[-11:]

    check_beside(server, tmp_path, lambda: together([client] * num_clients))
