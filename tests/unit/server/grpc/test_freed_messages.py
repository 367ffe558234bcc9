"""The messages of a gRPC call are freed when the call ends, and not when the collector comes:
some refused messages of tens of megabytes would take the memory of a front end."""

import gc
import time
from contextlib import suppress

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from trimaran.server.decoding.body import SHORT_BYTES
from trimaran.server.grpc.messages import InferMessage
from trimaran.server.protocol.infer_json import ParsedInfer

SERVICE = "/inference.GRPCInferenceService/"
ENOUGH_S = 30.0


@pytest.fixture
def no_collector():
    """Without the collector; yields what earlier tests of the process have left."""
    gc.collect()
    gc.disable()
    yield held()
    gc.enable()


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.grpc_url) as channel:
        yield channel


def request_of(model, datatype="INT64", *, num_values=4, **more):
    request = pb.ModelInferRequest(model_name=model, id="mine", **more)
    entry = request.inputs.add(name="INT64", datatype=datatype, shape=[num_values])
    entry.contents.int64_contents.extend([1 << 40] * num_values)
    return request


LONG = SHORT_BYTES // 4
MESSAGES = {
    "answered": request_of("echo").SerializeToString(),
    "long and answered": request_of("echo", num_values=LONG).SerializeToString(),
    "of another type": request_of("echo", "FP32").SerializeToString(),
    "long and of another type": request_of("echo", "FP32", num_values=LONG).SerializeToString(),
    "of no model": request_of("none").SerializeToString(),
    "undecodable": request_of("echo").SerializeToString() + b"\x2a\x05",
    "long and undecodable": request_of("echo", num_values=LONG).SerializeToString()
    + b"\x2a\x01x",
}  # fmt: skip


def held():
    kinds = (InferMessage, ParsedInfer)
    return [each for each in gc.get_objects() if isinstance(each, kinds)]


def check_all_freed(earlier):
    """The server's side of a call ends a moment after the client's, and may also begin later
    than the first look."""

    def later():
        # As text: a list of what is held would hold it.
        return [repr(each) for each in held() if not any(each is one for one in earlier)]

    end = time.monotonic() + ENOUGH_S
    while (rest := later()) and time.monotonic() < end:
        time.sleep(0.01)
    assert rest == []


@pytest.mark.parametrize("name", MESSAGES)
def test_the_message_of_a_call_is_freed_at_its_end(channel, no_collector, name):
    call = channel.unary_unary(SERVICE + "ModelInfer")
    answer = call.future(MESSAGES[name], timeout=60)
    assert ("answered" in name) == (answer.code() is grpc.StatusCode.OK), answer.details()
    check_all_freed(no_collector)


def failing():
    """A request that fails while its model runs, which then ends its call."""
    request = pb.ModelInferRequest(model_name="repeat", id="f")
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    text.contents.bytes_contents.append(b"f")
    for name, value in {"max_tokens": 3, "fail_at": 0}.items():
        number = request.inputs.add(name=name, datatype="INT32", shape=[1, 1])
        number.contents.int_contents.append(value)
    return request.SerializeToString()


@pytest.mark.parametrize("name", [*MESSAGES, "failing"])
def test_the_messages_of_a_stream_are_freed_at_its_end(channel, no_collector, name):
    stream = channel.stream_stream(SERVICE + "ModelStreamInfer")
    message = failing() if name == "failing" else MESSAGES[name]
    answers = stream(iter([message]), timeout=60, metadata=[("triton_grpc_error", "true")])
    with suppress(grpc.RpcError):
        assert list(answers)
    ends = {"undecodable": "INTERNAL", "failing": "INTERNAL"}
    assert answers.code().name == ends.get(name, "OK"), answers.details()
    check_all_freed(no_collector)


def test_the_message_of_a_cancelled_call_is_freed(channel, no_collector):
    call = channel.unary_unary(SERVICE + "ModelInfer")
    for pause_s in (0.0, 0.001, 0.01):
        answer = call.future(MESSAGES["long and answered"], timeout=60)
        time.sleep(pause_s)
        answer.cancel()
        check_all_freed(no_collector)
