"""Requests during a drain, as clients see them."""

import base64
import http.client
import json
import random
import socket
import threading
from contextlib import closing, suppress

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc


def repeat_request(request_id, count, delay_ms):
    message = pb.ModelInferRequest(model_name="repeat", id=request_id)
    values = {"max_tokens": count, "delay_ms": delay_ms}
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    message.inputs[0].contents.bytes_contents.append(b"a")
    for name, value in values.items():
        tensor = message.inputs.add(name=name, datatype="INT32", shape=[1, 1])
        tensor.contents.int_contents.append(value)
    return message


async def _drain(server):
    server.service.admission.start_draining()
    server.http.close_idle_connections()


def test_running_requests_finish_and_new_ones_are_refused(fresh_server):
    server = fresh_server
    found = []
    body = {"text_input": "a", "max_tokens": 100, "delay_ms": 5}
    running = threading.Thread(
        target=lambda: found.append(server.post("/v2/models/repeat/generate_stream", body))
    )
    running.start()
    server.wait_until(lambda: server.repeat.num_running == 1)
    server.run(_drain(server))
    for action in ("infer", "generate", "generate_stream"):
        answer = server.post(f"/v2/models/repeat/{action}", body)
        assert (answer.status, answer.error) == (
            503,
            "Server is stopping, scheduler for model has stopped accepting new inference "
            "requests",
        )
        assert answer.headers["Connection"] == "close"
    assert server.get("/v2/health/ready").status == 400
    assert server.get("/v2/health/live").status == 200
    server.run(server.service.admission.wait_idle())
    running.join()
    assert len(found[0].events) == 100


GIVEN_UP = (
    "Server is stopping: the request had not ended within the 30 s that --exit-timeout leaves. "
    "Send it again, or raise --exit-timeout."
)


async def _abort_running(server):
    await _drain(server)
    await server.service.admission.abort_running(30.0)


def test_requests_that_outlast_the_drain_get_an_error(fresh_server):
    server = fresh_server
    found = {}
    body = {"text_input": "a", "max_tokens": 1000, "delay_ms": 50}

    def ask(name, **changes):
        action = "generate" if name == "generate" else "generate_stream"
        found[name] = server.post(f"/v2/models/repeat/{action}", {**body, **changes})

    changes = {"stream": {}, "generate": {}, "unbegun": {"delay_ms": 100_000}}
    threads = [threading.Thread(target=ask, args=(n,), kwargs=c) for n, c in changes.items()]
    threads[0].start()
    # The stream has begun: a second response comes behind the first one's event.
    server.wait_until(lambda: server.repeat.num_responses >= 2)
    for thread in threads[1:]:
        thread.start()
    server.wait_until(lambda: server.repeat.num_running == 3)
    server.run(_abort_running(server))
    for thread in threads:
        thread.join()
    assert server.repeat.num_ended_early == 3
    assert server.service.admission.num_running == 0
    for name in ("generate", "unbegun"):
        assert (found[name].status, found[name].error) == (503, GIVEN_UP)
    *responses, last = found["stream"].events
    assert found["stream"].status == 200
    assert responses and all("text_output" in response for response in responses)
    assert last == {"error": GIVEN_UP}


def test_streams_of_grpc_that_outlast_the_drain_end_with_an_error(fresh_server):
    server = fresh_server
    go_on = threading.Event()

    def requests():
        yield repeat_request("long", 1000, 50)
        go_on.wait()

    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        responses = stub.ModelStreamInfer(requests())
        next(responses)
        server.run(_abort_running(server))
        go_on.set()
        last = list(responses)[-1]
    assert last.error_message == GIVEN_UP
    assert last.infer_response.id == "long"
    assert last.infer_response.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize("count", [1, 1000])
def test_a_pending_message_arrives_before_the_error_of_the_drain(fresh_server, count):
    server = fresh_server
    long = repeat_request("long", count, 50)
    long.inputs[0].contents.bytes_contents[0] = b"a" * (11 << 20)
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.grpc_url, options) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        responses = stub.ModelStreamInfer(iter([long]))
        # The event arrives with the first message, whose rest waits for the reader.
        assert responses.initial_metadata() is not None
        server.run(_abort_running(server))
        first, *others = responses
    assert len(first.infer_response.raw_output_contents[0]) > 11 << 20
    # A complete stream has no error.
    assert [other.error_message for other in others] == [GIVEN_UP] * (count > 1)
    assert responses.code() is grpc.StatusCode.OK


def test_unary_calls_that_outlast_the_drain_are_unavailable(fresh_server):
    server = fresh_server
    server.repeat.is_decoupled = False
    found = {}
    body = {
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]},
            {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [1]},
            {"name": "delay_ms", "datatype": "INT32", "shape": [1, 1], "data": [100_000]},
        ]
    }

    def ask():
        found["http"] = server.post("/v2/models/repeat/infer", body)

    thread = threading.Thread(target=ask)
    thread.start()
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelInfer.future(repeat_request("call", 1, 100_000))
        server.wait_until(lambda: server.repeat.num_running == 2)
        server.run(_abort_running(server))
        thread.join()
        assert (call.exception().code().name, call.exception().details()) == (
            "UNAVAILABLE",
            GIVEN_UP,
        )
    assert (found["http"].status, found["http"].error) == (503, GIVEN_UP)


@pytest.mark.parametrize("action", ["infer", "generate"])
@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_a_long_answer_that_is_still_read_counts_as_running(fresh_server, action, coding):
    server = fresh_server
    server.repeat.is_decoupled = False
    # Longer than socket buffers, even when compressed.
    text = base64.b64encode(random.Random(7).randbytes(8 << 20)).decode()
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [text]}
    count = {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [1]}
    body = {"text_input": text, "max_tokens": 1}
    if action == "infer":
        body = {"inputs": [tensor, count]}
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    with closing(connection), socket.socket() as connection.sock:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.sock.connect(("127.0.0.1", server.http_port))
        headers = {"Accept-Encoding": coding}
        connection.request("POST", f"/v2/models/repeat/{action}", json.dumps(body), headers)
        answer = connection.getresponse()
        server.run(_drain(server))
        assert server.service.admission.num_running == 1
        assert len(answer.read()) == int(answer.getheader("Content-Length"))
    server.run(server.service.admission.wait_idle())


class Valve:
    """A relay to a port that holds all answers while closed."""

    def __init__(self, port):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_open = threading.Event()
        self.is_open.set()
        self._port = port
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self):
        self.is_open.set()
        self._thread.join()

    def _run(self):
        server = socket.create_connection(("127.0.0.1", self._port))
        with self._listener, self._listener.accept()[0] as client, server:
            back = threading.Thread(target=self._pass, args=(server, client))
            back.start()
            self._pass(client, server)
            back.join()

    def _pass(self, source, target):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if source.getpeername()[1] == self._port:
                    self.is_open.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def test_a_long_response_of_grpc_that_is_still_read_counts_as_running(fresh_server):
    server = fresh_server
    server.repeat.is_decoupled = False
    long = repeat_request("long", 1, 0)
    long.parameters["times"].int64_param = 16 << 20
    options = [("grpc.max_receive_message_length", -1)]
    with closing(Valve(server.grpc.port)) as valve:
        with grpc.insecure_channel(valve.url, options) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert stub.ServerLive(pb.ServerLiveRequest()).live
            valve.is_open.clear()
            call = stub.ModelInfer.future(long)
            server.wait_until(lambda: server.repeat.num_responses == 1)
            server.run(_drain(server))
            # This call has passed what was to be done for the first one.
            with pytest.raises(grpc.RpcError), grpc.insecure_channel(server.grpc_url) as other:
                refused = service_pb2_grpc.GRPCInferenceServiceStub(other)
                refused.ModelInfer(long)
            assert server.service.admission.num_running == 1
            valve.is_open.set()
            assert len(call.result().raw_output_contents[0]) > 16 << 20
            server.run(server.service.admission.wait_idle())


def test_idle_connections_are_closed_at_once(fresh_server):
    server = fresh_server
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.request("GET", "/v2")
    connection.getresponse().read()
    server.run(_drain(server))
    assert connection.sock.recv(1) == b""
    connection.close()


def test_a_request_with_a_body_in_transfer_is_refused_with_an_answer(fresh_server):
    server = fresh_server
    body = json.dumps({"text_input": "a", "max_tokens": 1}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.putrequest("POST", "/v2/models/repeat/generate")
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body[:5])
    assert server.post("/v2/models/repeat/generate", body).status == 200
    server.run(_drain(server))
    # It does not hold up the drain either.
    server.run(server.service.admission.wait_idle())
    connection.send(body[5:])
    response = connection.getresponse()
    assert response.status == 503
    assert json.loads(response.read())["error"].startswith("Server is stopping")
    connection.close()


def test_grpc_refuses_new_requests_and_finishes_running_requests(fresh_server):
    server = fresh_server
    text = "GRPC server is shutting down and has stopped accepting new requests."
    go_on = threading.Event()

    def requests():
        yield repeat_request("early", 20, 20)
        go_on.wait()
        yield repeat_request("late", 1, 0)

    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        responses = stub.ModelStreamInfer(requests())
        next(responses)
        server.run(_drain(server))
        go_on.set()
        rest = list(responses)
        late = [r for r in rest if r.infer_response.id == "late"]
        assert [r.error_message for r in late] == [text]
        assert len(rest) == 20
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(pb.ModelInferRequest(model_name="double"))
        assert (caught.value.code().name, caught.value.details()) == ("UNAVAILABLE", text)
        assert not stub.ServerReady(pb.ServerReadyRequest()).ready
