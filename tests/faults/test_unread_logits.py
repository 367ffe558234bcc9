"""Logits that clients ask for and do not read, beside clients that read."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from bystanders import Watched
from served import DEMO_MODEL, Served, init_repo, run_trimaran
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

pytestmark = pytest.mark.timeout(240)

MAX_GAP_S = 1.0
LIMIT_BYTES = 8 << 20
NUM_UNREAD = 3
"""Streams of each protocol."""
NUM_TOKENS = 800
ROW_BYTES = 4096 * 4
"""Logits of one token of the demo model: the streams together ask for 92 MB."""
MAX_GROWTH_MB = 60.0
"""The limit, what is being written, and the memory of the event loop."""
ASK = {
    "text_input": "a", "max_tokens": NUM_TOKENS, "end_id": -1, "stream": True,
    "return_generation_logits": True,
}  # fmt: skip
PATH = "/v2/models/ensemble/generate_stream"
TEXT = "--max-unread-logits-bytes"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("unread")
    engine = folder / "engine"
    done = run_trimaran("build", "--checkpoint", str(DEMO_MODEL), "--output", str(engine))
    assert done.returncode == 0, done.stderr
    fill = f"tokenizer_dir:{DEMO_MODEL},engine_dir:{engine},decoupled_mode:True"
    init_repo(str(folder / "models"), "--defaults", "--fill", fill)
    flags = ("--max-unread-logits-bytes", str(LIMIT_BYTES))
    with Served(folder / "models", 1, flags, folder / "serve.log") as served:
        yield served


def _asked(server: Served, stack: contextlib.ExitStack) -> socket.socket:
    """A connection that has asked for a stream, with a small buffer for the answer."""
    sock = stack.enter_context(socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    sock.settimeout(60)
    sock.connect(("127.0.0.1", server.http_port))
    body = json.dumps(ASK)
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall((head + body).encode())
    return sock


def _message() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="ensemble")
    values = {
        "text_input": np.array([[b"a"]], object),
        "max_tokens": np.array([[NUM_TOKENS]], np.int32),
        "end_id": np.array([[-1]], np.int32), "stream": np.array([[True]]),
        "return_generation_logits": np.array([[True]]),
    }  # fmt: skip
    for name, value in values.items():
        datatype = {"O": "BYTES", "i": "INT32", "b": "BOOL"}[value.dtype.kind]
        request.inputs.add(name=name, datatype=datatype, shape=value.shape)
        raw = b"\1\0\0\0a" if datatype == "BYTES" else value.tobytes()
        request.raw_input_contents.append(raw)
    return request


def _channel(server: Served, stack: contextlib.ExitStack) -> grpc.Channel:
    options = [
        ("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1),
        ("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.http2.bdp_probe", 0),
    ]  # fmt: skip
    address = f"127.0.0.1:{server.grpc_port}"
    return stack.enter_context(grpc.insecure_channel(address, options))


def _told_by(sock: socket.socket) -> str:
    """Everything that a connection still has."""
    told = b""
    while part := sock.recv(1 << 20):
        told += part
        if told.endswith(b"0\r\n\r\n"):
            break
    return told.decode()


def test_streams_with_unread_logits_are_ended_and_the_one_that_is_read_is_whole(server):
    with contextlib.ExitStack() as stack:
        stub = GRPCInferenceServiceStub(_channel(server, stack))
        # Memory is looked at once the server has answered one such stream.
        list(stub.ModelStreamInfer(iter([_message()]), timeout=120))
        with Watched(server.http_port, server.process.pid) as watched:
            sockets = [_asked(server, stack) for _ in range(NUM_UNREAD)]
            calls = [
                GRPCInferenceServiceStub(_channel(server, stack)).ModelStreamInfer(
                    iter([_message()]), timeout=200
                )
                for _ in range(NUM_UNREAD)
            ]
            read = list(stub.ModelStreamInfer(iter([_message()]), timeout=120))
            server.wait_log("A stream is ended: its client leaves", 2)
        told = [_told_by(sock) for sock in sockets]
        answers = [list(call)[-1] for call in calls]
    print(f"\n  {watched.seen}")
    assert not any(each.error_message for each in read)
    assert sum(_num_logits(each) for each in read) == NUM_TOKENS
    ended = [each for each in told if TEXT in each]
    ended += [each.error_message for each in answers if TEXT in each.error_message]
    assert len(ended) >= 2
    assert all(" bytes of this stream's logits" in each for each in ended)
    assert server.log().count("A stream is ended") == len(ended)
    assert watched.seen.failure == ""
    assert watched.seen.stream_gap_s < MAX_GAP_S
    assert watched.seen.health_s < MAX_GAP_S
    assert watched.seen.grown_mb < MAX_GROWTH_MB


def _num_logits(answer: pb.ModelStreamInferResponse) -> int:
    """Tokens of which an answer has the logits."""
    names = [output.name for output in answer.infer_response.outputs]
    if "generation_logits" not in names:
        return 0
    place = names.index("generation_logits")
    return len(answer.infer_response.raw_output_contents[place]) // ROW_BYTES
