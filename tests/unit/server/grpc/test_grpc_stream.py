"""``ModelStreamInfer`` as clients see it."""

import asyncio
import queue
import threading
import time

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc


def repeat(request_id, count, version="", **numbers):
    message = pb.ModelInferRequest(model_name="repeat", id=request_id, model_version=version)
    values = {"max_tokens": count, **numbers}
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    message.inputs[0].contents.bytes_contents.append(request_id.encode())
    for name, value in values.items():
        tensor = message.inputs.add(name=name, shape=[1, 1])
        if isinstance(value, bool):
            tensor.datatype = "BOOL"
            tensor.contents.bool_contents.append(value)
        else:
            tensor.datatype = "INT32"
            tensor.contents.int_contents.append(value)
    return message


def double(request_id, value):
    message = pb.ModelInferRequest(model_name="double", id=request_id)
    tensor = message.inputs.add(name="X", datatype="INT32", shape=[1, 2])
    tensor.contents.int_contents.extend([value, value])
    return message


def with_empty_final(message):
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


@pytest.fixture
def stream(server):
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        yield lambda *messages, **options: stub.ModelStreamInfer(iter(messages), **options)


def finals(responses):
    return [
        response.infer_response.parameters["triton_final_response"].bool_param
        for response in responses
    ]


def texts(responses):
    return [r.infer_response.raw_output_contents[0][4:].decode() for r in responses]


def test_responses_come_in_order_and_only_the_last_is_final(stream):
    responses = list(stream(repeat("a", 3)))
    assert texts(responses) == ["a 0", "a 1", "a 2"]
    assert finals(responses) == [False, False, True]
    assert {(r.infer_response.id, r.infer_response.model_version) for r in responses} == {
        ("a", "1")
    }
    assert {r.error_message for r in responses} == {""}


def test_the_empty_final_response_is_sent_only_if_requested(stream):
    assert finals(stream(repeat("a", 2, has_flag_only_end=True))) == [False, False]
    message = with_empty_final(repeat("a", 2, has_flag_only_end=True))
    *_, last = stream(message)
    assert last.infer_response.id == "a"
    assert last.infer_response.model_name == "repeat"
    assert last.infer_response.model_version == ""
    assert not last.infer_response.outputs
    assert finals([last]) == [True]


def test_no_empty_message_follows_a_final_response(stream):
    assert finals(stream(with_empty_final(repeat("a", 2)))) == [False, True]


def test_requests_of_one_stream_run_at_the_same_time(stream):
    call = stream(repeat("slow", 1, delay_ms=3_600_000), repeat("fast", 2))
    assert texts([next(call), next(call)]) == ["fast 0", "fast 1"]
    call.cancel()


def test_non_decoupled_answers_keep_the_requests_order_and_are_final(stream):
    responses = list(stream(*(double(str(n), n) for n in range(50))))
    assert [r.infer_response.id for r in responses] == [str(n) for n in range(50)]
    assert set(finals(responses)) == {True}


def test_errors_of_non_decoupled_models_keep_the_requests_order_too(stream):
    slow = double("slow", 1)
    slow.parameters["delay_ms"].int64_param = 300
    invalid = double("invalid", 1)
    invalid.inputs[0].shape[:] = [5, 2]
    unknown = pb.ModelInferRequest(model_name="x", id="unknown")
    failing = {}
    for kind in (b"INTERNAL", b"full", b"bug"):
        failing[kind] = pb.ModelInferRequest(model_name="fail", id=kind.decode())
        tensor = failing[kind].inputs.add(name="KIND", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(kind)
    quick = double("quick", 2)
    responses = list(stream(slow, invalid, unknown, *failing.values(), quick))
    assert [r.infer_response.id for r in responses] == [
        "slow", "invalid", "unknown", "INTERNAL", "full", "bug", "quick",
    ]  # fmt: skip
    assert [bool(r.error_message) for r in responses] == [False, *[True] * 5, False]


def test_no_requests_give_no_messages(stream):
    assert list(stream()) == []


def test_a_refused_request_is_answered_with_its_id_and_the_stream_continues(stream):
    unknown = repeat("u", 1)
    unknown.model_name = "x"
    invalid = repeat("i", 1)
    del invalid.inputs[1]
    responses = list(stream(unknown, invalid, repeat("a", 1)))
    found = {r.infer_response.id: r for r in responses}
    assert found["u"].error_message == "Request for unknown model: 'x' is not found"
    assert found["i"].error_message.startswith("[request id: i] expected number of inputs")
    for name in "ui":
        assert found[name].infer_response == pb.ModelInferResponse(id=name)
    assert texts([found["a"]]) == ["a 0"]


def test_a_request_at_a_full_queue_is_refused_like_an_invalid_request(stream):
    refused = repeat("f", 3)
    refused.parameters["refuse_at"].int64_param = 0
    metadata = [("triton_grpc_error", "true")]
    responses = list(stream(refused, repeat("a", 1), metadata=metadata))
    (failure,) = [r for r in responses if r.error_message]
    assert failure.error_message == "the queue is full"
    assert failure.infer_response == pb.ModelInferResponse(id="f")
    assert texts([r for r in responses if r.infer_response.id == "a"]) == ["a 0"]


def test_a_sample_at_a_full_queue_ends_its_whole_request(stream):
    refused = repeat("f", 3)
    refused.parameters["refuse_at"].int64_param = 1
    *_, failure = stream(refused)
    assert failure.error_message == "the queue is full"
    assert finals([failure]) == [True]


def test_an_error_while_running_is_final_and_the_stream_continues(stream):
    *_, failure = stream(repeat("f", 3, version="1", fail_at=1))
    assert failure.error_message == "boom"
    response = failure.infer_response
    assert (response.id, response.model_name, response.model_version) == ("f", "repeat", "1")
    assert finals([failure]) == [True]


def test_a_bug_while_running_is_an_error_and_the_stream_continues(stream):
    crashing = repeat("c", 3)
    crashing.parameters["crash_at"].int64_param = 1
    responses = list(stream(crashing, repeat("a", 2)))
    (failure,) = [r for r in responses if r.error_message]
    assert failure.infer_response.id == "c"
    assert failure.error_message.startswith("internal error")
    assert texts([r for r in responses if r.infer_response.id == "a"]) == ["a 0", "a 1"]


def test_an_error_while_running_ends_the_call_if_requested(stream):
    call = stream(
        repeat("slow", 2, delay_ms=60_000),
        repeat("f", 3, fail_at=0),
        metadata=[("triton_grpc_error", "true")],
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert (caught.value.code().name, caught.value.details()) == ("INTERNAL", "boom")


def test_an_error_that_ends_a_call_follows_pending_messages(server):
    long = repeat("long", 1000, delay_ms=50)
    long.inputs[0].contents.bytes_contents[0] = b"a" * (8 << 20)
    has_begun, is_sent = threading.Event(), threading.Event()

    def messages():
        yield long
        has_begun.wait()
        yield repeat("f", 1, fail_at=0)
        is_sent.set()

    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.grpc_url, options) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(messages(), metadata=[("triton_grpc_error", "true")])
        # The event arrives with the first message, whose rest waits for the reader.
        assert call.initial_metadata() is not None
        has_begun.set()
        is_sent.wait()
        list(stub.ModelStreamInfer(iter([repeat("other", 3, delay_ms=20)])))
        assert texts([next(call)]) == ["a" * (8 << 20) + " 0"]
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert (caught.value.code().name, caught.value.details()) == ("INTERNAL", "boom")


def test_an_error_before_running_never_ends_the_call(stream):
    unknown = repeat("u", 1)
    unknown.model_name = "x"
    (response,) = stream(unknown, metadata=[("triton_grpc_error", "true")])
    assert response.error_message


def test_cancelling_a_stream_ends_all_its_requests_and_no_others(fresh_server):
    with grpc.insecure_channel(fresh_server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(
            iter([repeat("a", 1, delay_ms=3_600_000), repeat("b", 1, delay_ms=3_600_000)])
        )
        fresh_server.wait_until(lambda: fresh_server.repeat.num_running == 2)
        other = stub.ModelStreamInfer(iter([repeat("o", 300, delay_ms=5)]))
        next(other)
        call.cancel()
        fresh_server.wait_until(lambda: fresh_server.repeat.num_ended_early == 2)
        assert len(list(other)) == 299
    assert fresh_server.repeat.num_ended_early == 2


def test_a_slow_reader_is_throttled_and_delays_no_other_stream(fresh_server):
    server = fresh_server
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        long = repeat("slow", 10_000)
        long.inputs[0].contents.bytes_contents[0] = b"x" * 10_000
        slow = stub.ModelStreamInfer(iter([long]))
        next(slow)
        seen = -1
        while seen != server.repeat.num_responses:
            seen = server.repeat.num_responses
            quick = stub.ModelInfer(double("q", 1), timeout=60)
            assert quick.id == "q"
            time.sleep(0.02)
        # Far from all: unread responses are not made.
        assert server.repeat.num_responses < 5_000
        assert server.repeat.num_running == 1
        slow.cancel()
    server.wait_until(lambda: server.repeat.num_running == 0)


def test_a_lost_connection_ends_its_requests(fresh_server):
    channel = grpc.insecure_channel(fresh_server.grpc_url)
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    call = stub.ModelStreamInfer(iter([repeat("a", 10_000, delay_ms=1)]))
    next(call)
    channel.close()
    fresh_server.wait_until(lambda: fresh_server.repeat.num_running == 0)
    assert fresh_server.repeat.num_ended_early == 1


def test_a_disconnect_within_a_message_is_no_error_of_the_server(fresh_server, caplog):
    leaving = 40
    with grpc.insecure_channel(fresh_server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(leaving):
            long = repeat("slow", 10_000)
            long.inputs[0].contents.bytes_contents[0] = b"x" * 10_000
            call = stub.ModelStreamInfer(iter([long]))
            next(call)
            call.cancel()
        fresh_server.wait_until(lambda: fresh_server.repeat.num_ended_early == leaving)
    fresh_server.wait_until(lambda: fresh_server.repeat.num_running == 0)
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []


def test_tritonclient_streams_through_its_callback(server):
    client = triton.InferenceServerClient(server.grpc_url)
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    inputs = [
        triton.InferInput("text_input", [1, 1], "BYTES"),
        triton.InferInput("max_tokens", [1, 1], "INT32"),
    ]
    inputs[0].set_data_from_numpy(np.array([[b"hi"]], object))
    inputs[1].set_data_from_numpy(np.array([[3]], np.int32))
    client.async_stream_infer(
        "repeat", inputs, request_id="9", enable_empty_final_response=True
    )
    found = []
    is_final = False
    while not is_final:
        result, error = answers.get(timeout=60)
        assert error is None
        found.append(result.as_numpy("text_output").item())
        is_final = result.get_response().parameters["triton_final_response"].bool_param
    assert found == [b"hi 0", b"hi 1", b"hi 2"]
    client.stop_stream()
    client.close()


async def _two_hundred_streams(url):
    async with triton_aio.InferenceServerClient(url) as client:

        async def one(name):
            inputs = [
                triton_aio.InferInput("text_input", [1, 1], "BYTES"),
                triton_aio.InferInput("max_tokens", [1, 1], "INT32"),
            ]
            inputs[0].set_data_from_numpy(np.array([[name.encode()]], object))
            inputs[1].set_data_from_numpy(np.array([[20]], np.int32))

            async def requests():
                yield {"model_name": "repeat", "inputs": inputs, "request_id": name}

            found = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                assert result.get_response().id == name
                found.append(result.as_numpy("text_output").item().decode())
            return found

        return await asyncio.gather(*(one(f"s{n}") for n in range(200)))


def test_two_hundred_streams_finish_and_none_are_mixed_up(server):
    found = asyncio.run(_two_hundred_streams(server.grpc_url))
    assert found == [[f"s{n} {i}" for i in range(20)] for n in range(200)]
