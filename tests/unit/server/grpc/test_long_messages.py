"""Long gRPC messages are decoded elsewhere: no stream waits, and what comes out is the same."""

import random
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import grpc
import numpy as np
import pytest
from loop_watch import LONGEST_PAUSE_S, LoopWatch
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

import trimaran.server.grpc.server as server_module
from trimaran.comm.errors import RequestError
from trimaran.server.administration import CONTROL_REFUSED
from trimaran.server.decoding.body import SHORT_BYTES
from trimaran.server.decoding.pending import PendingBodies
from trimaran.server.grpc.messages import InferMessage
from trimaran.server.inference.cooperative import run_at_once
from trimaran.server.memory import resident_bytes, return_large_blocks
from trimaran.server.protocol.message_scan import (
    MAX_FIELDS,
    MalformedError,
    check_num_elements,
    names_of,
    split_infer,
)

LIMIT = 48 << 20
SERVICE = "/inference.GRPCInferenceService/"


@pytest.fixture
def channel(server):
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.grpc_url, options) as channel:
        yield channel


def call_raw(channel, method, raw):
    return channel.unary_unary(SERVICE + method)(raw, timeout=120)


def refusal(channel, method, raw):
    with pytest.raises(grpc.RpcError) as caught:
        call_raw(channel, method, raw)
    return caught.value.code(), caught.value.details()


def echo_request(**inputs):
    request = pb.ModelInferRequest(model_name="echo", id="mine")
    for name, values in inputs.items():
        entry = request.inputs.add(name=name, datatype=name if name != "TEXT" else "BYTES")
        entry.shape.append(len(values))
        field = {"INT64": "int64_contents", "FP32": "fp32_contents", "TEXT": "bytes_contents",
                 "INT8": "int_contents"}[name]  # fmt: skip
        getattr(entry.contents, field).extend(values)
    return request


STRANGERS = {
    # Each is the shortest form of something that a client can repeat without end.
    "inputs": b"\x2a\x00",
    "outputs": b"\x32\x00",
    "raw tensors": b"\x3a\x00",
    "unknown fields": b"\x98\x06\x00",
    "parameters": b"\x22\x00",
    "names": b"\x0a\x00",
}


@pytest.mark.matrix(keep=6)
@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("model", ["echo", "none"])
def test_no_stream_waits_for_millions_of_fields(server, channel, kind, model):
    raw = pb.ModelInferRequest(model_name=model).SerializeToString()
    raw += STRANGERS[kind] * ((LIMIT - 1000) // len(STRANGERS[kind]))
    with LoopWatch(server) as watch:
        code, text = refusal(channel, "ModelInfer", raw)
    assert watch.longest_s < LONGEST_PAUSE_S
    if model == "none" or kind == "names":
        assert code is grpc.StatusCode.NOT_FOUND
    else:
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text == (
            f"a message has at most {MAX_FIELDS} inputs, outputs, parameters and raw tensors"
        )


VALUES = {
    "strings": lambda count: delimited(5, b"\x42\x00" * count),
    "shape": lambda count: delimited(3, b"\x01" * 2 * count),
    "numbers": lambda count: delimited(5, delimited(2, b"\x01" * 2 * count)),
    "parameters": lambda count: b"\x22\x00" * count,
}


# The kept cases leave out the parameters of an input, of which the short message takes longest.
@pytest.mark.matrix(keep=6)
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("num_bytes", [LIMIT // 5, LIMIT // 3])
def test_no_stream_waits_for_millions_of_values(server, channel, kind, num_bytes):
    raw = pb.ModelInferRequest(model_name="echo").SerializeToString()
    raw += delimited(5, b"\x0a\x04TEXT\x12\x05BYTES" + VALUES[kind](num_bytes // 2))
    with LoopWatch(server) as watch:
        code, text = refusal(channel, "ModelInfer", raw)
    assert watch.longest_s < LONGEST_PAUSE_S
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    if len(raw) > LIMIT // 4:
        assert text == (
            f"the message has {len(raw)} bytes beside its raw tensors, and at most "
            f"{LIMIT // 4} are allowed. Send tensors as raw_input_contents, or use "
            "--grpc-max-message-size to increase the limit."
        )


MAX_ELEMENTS = LIMIT // 16
ELEMENTS = {
    "strings": lambda count: delimited(5, b"\x42\x00" * count),
    "dimensions": lambda count: delimited(3, b"\x01" * count),
    "numbers": lambda count: delimited(5, delimited(2, b"\x01" * count)),
    "unpacked numbers": lambda count: delimited(5, b"\x10\x01" * count),
    "unpacked dimensions": lambda count: b"\x18\x01" * count,
}


@pytest.mark.matrix(keep=3)
@pytest.mark.parametrize("kind", ELEMENTS)
def test_a_long_message_has_a_bounded_number_of_explicit_elements(channel, kind):
    head = pb.ModelInferRequest(model_name="echo").SerializeToString()

    def refused(count):
        datatype = b"INT32" if "numbers" in kind else b"BYTES"
        entry = b"\x0a\x04TEXT\x12\x05" + datatype + ELEMENTS[kind](count)
        return refusal(channel, "ModelInfer", head + delimited(5, entry))

    weight = 4 if kind == "strings" else 1
    code, text = refused(MAX_ELEMENTS // weight + 1)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text == (
        f"the message has more than {MAX_ELEMENTS} explicit elements, dimensions and other "
        "fields of inputs, of which a string or parameter counts as four. Send tensors as "
        "raw_input_contents, or use --grpc-max-message-size to increase the limit."
    )
    # The name and the datatype are within the limit.
    _, text = refused((MAX_ELEMENTS - 8) // weight)
    assert "explicit elements" not in text


@pytest.mark.parametrize("number", [65, 100_000, 1_000_000])
def test_a_shape_has_a_bounded_number_of_dimensions(server, channel, number):
    head = pb.ModelInferRequest(model_name="echo").SerializeToString()
    shape = delimited(3, b"\x01" * number)
    entry = b"\x0a\x04TEXT\x12\x05BYTES" + shape + delimited(5, delimited(8, b"a"))
    with LoopWatch(server) as watch:
        code, text = refusal(channel, "ModelInfer", head + delimited(5, entry))
    assert watch.longest_s < LONGEST_PAUSE_S
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    expected = f"the shape of input 'TEXT' has {number} dimensions, and at most 64 are allowed"
    assert text == expected
    answer = server.post(
        "/v2/models/echo/infer",
        b'{"inputs":[{"name":"TEXT","datatype":"BYTES","data":["a"],"shape":[%b1]}]}'
        % (b"1," * (number - 1)),
    )
    assert (answer.status, answer.error) == (400, expected)


@pytest.mark.parametrize("num_bytes", [5000, 10 << 20])
@pytest.mark.parametrize("what", ["id", "sequence id"])
def test_long_ids_are_refused_in_the_decoding_process(channel, what, num_bytes):
    request = echo_request(INT64=[1])
    if what == "id":
        request.id = "x" * num_bytes
    else:
        request.parameters["sequence_id"].string_param = "x" * num_bytes
    code, text = refusal(channel, "ModelInfer", request.SerializeToString())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text == (
        f"the request's {what} has {num_bytes} bytes, and at most 4096 are allowed. Send a "
        "shorter one."
    )


def delimited(number, payload):
    size, raw = len(payload), bytearray([number << 3 | 2])
    while size > 0x7F:
        raw.append(size & 0x7F | 0x80)
        size >>= 7
    raw.append(size)
    return bytes(raw) + payload


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("INT64", [1, -(1 << 62)] * 100_000),
        ("FP32", [0.5, -3.0] * 100_000),
        ("INT8", [1, -2, 127] * 100_000),
        ("TEXT", [b"", b"ab", "öl".encode(), b"\xff" * 100] * 10_000),
    ],
)
def test_long_messages_decode_like_short_messages(channel, name, values):
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    request = echo_request(**{name: values})
    request.parameters["mine"].string_param = "x"
    assert request.ByteSize() > SHORT_BYTES
    few = values[: len(set(values))]
    short = stub.ModelInfer(echo_request(**{name: few}))
    answer = stub.ModelInfer(request)
    assert answer.id == "mine" and answer.parameters["mine"].string_param == "x"
    repeats = len(values) // len(few)
    assert answer.raw_output_contents[0] == short.raw_output_contents[0] * repeats


def test_raw_tensors_of_a_long_message_stay_with_their_inputs(channel):
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    request = pb.ModelInferRequest(model_name="echo")
    numbers, halves = np.arange(200_000), np.arange(50, dtype=np.float16)
    for name, array in (("INT64", numbers), ("FP16", halves)):
        request.inputs.add(name=name, datatype=name, shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    answer = stub.ModelInfer(request)
    assert list(answer.raw_output_contents) == [numbers.tobytes(), halves.tobytes()]
    # The same with so many parameters that the rest is long too.
    for index in range(20_000):
        request.parameters[f"parameter {index}"].int64_param = index
    answer = stub.ModelInfer(request)
    assert list(answer.raw_output_contents) == [numbers.tobytes(), halves.tobytes()]
    assert answer.parameters["parameter 19999"].int64_param == 19999


def test_a_long_message_on_a_stream_is_answered(channel):
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    request = echo_request(INT64=[7] * 300_000)
    answers = list(stub.ModelStreamInfer(iter([request, echo_request(INT64=[1])])))
    assert [len(a.infer_response.raw_output_contents[0]) for a in answers] == [2_400_000, 8]


def test_long_messages_that_wait_for_decoding_share_a_limit():
    raw = echo_request(INT64=[7] * 300_000).SerializeToString()
    pending = PendingBodies(2 * len(raw), "--grpc-max-pending-size")
    first, second = (InferMessage.receive(raw, pending) for _ in range(2))
    refused = InferMessage.receive(raw, pending)
    assert (first.refusal, second.refusal, refused.raw) == (None, None, b"")
    assert "use --grpc-max-pending-size to increase the limit" in str(refused.refusal)
    short = echo_request(INT64=[7]).SerializeToString()
    assert InferMessage.receive(short, pending).decoded is not None
    del first
    assert InferMessage.receive(raw, pending).refusal is None


def test_other_requests_of_a_stream_go_on_beside_a_message_without_room(
    server, channel, monkeypatch
):
    monkeypatch.setattr(server.grpc._pending, "_max_bytes", 1 << 20)
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    long, short = echo_request(INT64=[7 << 40] * 300_000), echo_request(INT64=[1])
    refused, answer = stub.ModelStreamInfer(iter([long, short]))
    assert "--grpc-max-pending-size" in refused.error_message
    assert refused.infer_response.id == "mine"
    assert not answer.error_message
    assert len(answer.infer_response.raw_output_contents[0]) == 8
    code, text = refusal(channel, "ModelInfer", long.SerializeToString())
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "--grpc-max-pending-size" in text


LONG_SENDER = """
import sys, grpc
from tritonclient.grpc import service_pb2 as pb
contents = [bytes(40 << 20)]
raw = pb.ModelInferRequest(model_name="none", raw_input_contents=contents).SerializeToString()
with grpc.insecure_channel(sys.argv[1], [("grpc.max_send_message_length", -1)]) as channel:
    answer = channel.unary_unary(sys.argv[2]).future(raw, timeout=120)
    assert answer.code() is grpc.StatusCode.NOT_FOUND, answer.code()
"""


def test_the_buffers_of_a_long_message_are_given_back_before_its_request_runs(
    fresh_server, monkeypatch
):
    return_large_blocks()
    grown = []
    receive = InferMessage.receive

    def received(raw, pending):
        grown.append(resident_bytes() - before)
        return receive(raw, pending)

    monkeypatch.setitem(server_module._LONG_METHODS, "ModelInfer", received)
    address = fresh_server.grpc_url, SERVICE + "ModelInfer"
    for _ in range(3):
        before = resident_bytes()
        subprocess.run([sys.executable, "-c", LONG_SENDER, *address], check=True, timeout=120)
    assert max(grown) < 60 << 20, grown


@pytest.mark.parametrize("method", ["ModelInfer", "RepositoryModelLoad", "LogSettings"])
@pytest.mark.parametrize("num_bytes", [1000, 2 * SHORT_BYTES])
def test_invalid_bytes_end_the_call(channel, method, num_bytes):
    code, text = refusal(channel, method, b"\xff" * num_bytes)
    if method == "LogSettings" and num_bytes > 1000:
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "this method takes at most 65536" in text
    elif method == "RepositoryModelLoad" and num_bytes > 1000:
        # Clients of this server load nothing.
        assert code is grpc.StatusCode.UNAVAILABLE
        assert text == CONTROL_REFUSED
    else:
        assert code is grpc.StatusCode.INTERNAL
        assert text.startswith("the message cannot be decoded")


def test_a_message_over_the_limit_is_refused(channel):
    code, text = refusal(channel, "ModelInfer", bytes(LIMIT + 1))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in text


def test_a_long_load_request_is_decoded_in_a_helper_process(server, channel, monkeypatch):
    explicit = replace(server.service.config, model_control_mode="explicit")
    monkeypatch.setattr(server.service, "config", explicit)
    request = pb.RepositoryModelLoadRequest(model_name="absent")
    for index in range(50_000):
        request.parameters[f"file:1/{index}"].bytes_param = b"x"
    with LoopWatch(server) as watch:
        code, text = refusal(channel, "RepositoryModelLoad", request.SerializeToString())
    assert watch.longest_s < LONGEST_PAUSE_S
    assert code is grpc.StatusCode.INTERNAL
    assert "50000 files came with the request, and at most 1024 may" in text


@pytest.mark.parametrize("seed", range(20))
def test_the_elements_of_a_message_are_counted_before_it_is_decoded(seed):
    rng = random.Random(seed)
    message, number = pb.ModelInferRequest(model_name="m", id="i" * rng.randrange(300)), 0
    for _ in range(rng.randrange(1, 6)):
        entry = message.inputs.add(name="n" * rng.randrange(200), datatype="BYTES")
        entry.shape.extend(rng.choices([1, 127, 128, 1 << 40, -1], k=rng.randrange(5)))
        entry.parameters["p"].int64_param = 5
        for field in ("int_contents", "int64_contents", "uint64_contents", "fp32_contents",
                      "fp64_contents", "bool_contents", "uint_contents"):  # fmt: skip
            values = rng.choices([0, 1, 127, 1 << 20], k=rng.choice([0, 0, 3, 200]))
            getattr(entry.contents, field).extend(
                map(bool, values) if "bool" in field else values
            )
            number += len(values)
        strings = [b"x" * rng.choice([0, 1, 127, 128, 5000]) for _ in range(rng.randrange(50))]
        entry.contents.bytes_contents.extend(strings)
        # The name, the datatype and the parameter too.
        number += 4 * (len(strings) + bool(entry.name) + 2) + len(entry.shape)
    raw = message.SerializeToString()
    check_num_elements(raw, 16 * number)
    with pytest.raises(RequestError, match=f"more than {number - 1} explicit elements"):
        check_num_elements(raw, 16 * number - 16)
    for _ in range(50):
        cut = raw[: rng.randrange(len(raw))]
        with suppress(MalformedError, RequestError):
            check_num_elements(cut, 0)


def test_a_message_is_split_without_its_tensors():
    request = echo_request(INT64=[1, 2])
    request.raw_input_contents.extend([b"abc", b"", b"d" * 300])
    split = run_at_once(split_infer(request.SerializeToString()))
    assert [bytes(raw) for raw in split.raw_contents] == [b"abc", b"", b"d" * 300]
    del request.raw_input_contents[:]
    assert pb.ModelInferRequest.FromString(b"".join(split.head_parts)) == request
    names = names_of(request.SerializeToString())
    assert (names.model_name, names.id) == ("echo", "mine")


@pytest.mark.parametrize(
    "raw", [b"\x0a", b"\x0a\x05ab", b"\x80" * 11, b"\x0b\x0c", b"\x09\x01"]
)
def test_truncated_and_invalid_messages_are_malformed(raw):
    with pytest.raises(MalformedError):
        run_at_once(split_infer(raw))
    with pytest.raises(MalformedError):
        names_of(raw)
