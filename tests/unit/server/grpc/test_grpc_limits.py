"""gRPC clients that send nothing, or read nothing, and bounds on connections and calls."""

from __future__ import annotations

import socket
import threading

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.unit.server.conftest import RunningServer


@pytest.fixture
def start():
    servers = []

    def run(**config):
        servers.append(RunningServer(**config))
        return servers[-1]

    yield run
    for server in servers:
        server.close()


def connect(server):
    host, _, port = server.grpc_url.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def read_all(sock):
    while sock.recv(1 << 16):
        pass


@pytest.mark.parametrize("sent", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
def test_a_connection_without_a_handshake_is_closed(start, sent):
    server = start(grpc_options={"grpc.server_handshake_timeout_ms": 300})
    with connect(server) as sock:
        sock.sendall(sent)
        read_all(sock)


def test_an_idle_connection_is_closed_and_a_client_opens_another(start):
    server = start(grpc_options={"grpc.max_connection_idle_ms": 200})
    has_begun, has_ended = threading.Event(), threading.Event()

    def note(state):
        if state is grpc.ChannelConnectivity.READY:
            has_begun.set()
        elif has_begun.is_set():
            has_ended.set()

    with grpc.insecure_channel(server.grpc_url) as channel:
        channel.subscribe(note, try_to_connect=True)
        assert has_begun.wait(60)
        assert has_ended.wait(60)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(pb.ServerLiveRequest(), wait_for_ready=True).live


def test_connections_beyond_the_limit_are_closed(start):
    server = start(grpc_options={"grpc.max_allowed_incoming_connections": 2})
    with triton.InferenceServerClient(server.grpc_url) as first, connect(server):
        assert first.is_server_live()
        with connect(server) as third:
            try:
                read_all(third)
            except ConnectionResetError:
                pass
        assert first.is_server_live()


def test_calls_beyond_the_limit_are_refused(start):
    server = start(grpc_max_calls=1)
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        has_ended = threading.Event()

        def requests():
            yield repeat(1)
            has_ended.wait(60)

        held = stub.ModelStreamInfer(requests())
        next(held)
        server.wait_until(lambda: is_refused(stub))
        has_ended.set()
        assert list(held) == []
        server.wait_until(lambda: not is_refused(stub))


def is_refused(stub):
    try:
        stub.ServerLive(pb.ServerLiveRequest(), timeout=60)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return True
    return False


def test_a_unary_call_without_its_message_is_ended(start):
    server = start(grpc_message_timeout_s=0.3)
    has_ended = threading.Event()

    def nothing():
        has_ended.wait(60)
        yield from ()

    with grpc.insecure_channel(server.grpc_url) as channel:
        # On the wire a unary call is a stream of one message.
        call = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError, match="did not arrive within") as caught:
            call(nothing(), timeout=60)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(grpc.RpcError, match="the call has no message"):
            call(iter(()), timeout=60)
        has_ended.set()
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(pb.ServerLiveRequest()).live


def repeat(count):
    message = pb.ModelInferRequest(model_name="repeat", id="slow")
    values = (("text_input", "BYTES", b"x" * 10_000), ("max_tokens", "INT32", count))
    for name, datatype, value in values:
        tensor = message.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        contents = tensor.contents
        (contents.bytes_contents if datatype == "BYTES" else contents.int_contents).append(
            value
        )
    return message


def test_a_stream_that_is_not_read_ends_its_requests(start):
    server = start(grpc_send_timeout_s=0.3)
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        slow = stub.ModelStreamInfer(iter([repeat(10_000)]), timeout=60)
        next(slow)
        server.wait_until(lambda: server.repeat.num_ended_early == 1)
        assert server.repeat.num_responses < 9_000
        with pytest.raises(grpc.RpcError, match="--grpc-send-timeout") as caught:
            list(slow)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
    with triton.InferenceServerClient(server.grpc_url) as client:
        assert client.is_server_live()
