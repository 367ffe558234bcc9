"""The unary RPCs as clients see them."""

import queue

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from trimaran.server.inference.registry import VersionState


@pytest.fixture
def client(server):
    client = triton.InferenceServerClient(server.grpc_url)
    yield client
    client.close()


@pytest.fixture
def stub(server):
    with grpc.insecure_channel(server.grpc_url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def x_message(**changes):
    message = pb.ModelInferRequest(model_name="double", id="7")
    message.inputs.add(name="X", datatype="INT32", shape=[1, 2])
    message.raw_input_contents.append(np.array([1, 2], np.int32).tobytes())
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def failing(kind):
    message = pb.ModelInferRequest(model_name="fail")
    message.inputs.add(name="KIND", datatype="BYTES", shape=[1])
    message.inputs[0].contents.bytes_contents.append(kind)
    return message


def refusal(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, caught.value.details()


def test_tritonclient_reads_metadata_and_statistics(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("echo")
    assert client.get_server_metadata().name == "triton"
    assert client.get_model_metadata("double").inputs[0].shape == [-1, 2]
    assert client.get_model_config("repeat").config.model_transaction_policy.decoupled
    assert client.get_model_config("repeat", as_json=True)["config"]["max_batch_size"] == 8
    names = [model.name for model in client.get_model_repository_index().models]
    assert names == sorted(names)
    assert client.get_inference_statistics("echo").model_stats[0].name == "echo"
    assert {s.name for s in client.get_inference_statistics().model_stats} == set(names)
    assert client.get_log_settings().settings["log_info"].bool_param
    assert client.get_trace_settings().settings["trace_rate"].value == ["1000"]


def test_infer_answers_in_raw_contents_with_the_requests_id(stub):
    response = stub.ModelInfer(x_message())
    assert (response.id, response.model_name, response.model_version) == ("7", "double", "1")
    assert response.outputs[0].shape == [1, 2]
    assert not response.outputs[0].HasField("contents")
    assert np.frombuffer(response.raw_output_contents[0], np.int32).tolist() == [2, 4]


def test_tritonclient_sends_and_receives_every_datatype(client):
    arrays = {
        "TEXT": np.array([b"", b"\xff\x00a"], object),
        "FP32": np.array([1.5], np.float32),
        "FP16": np.array([0.5], np.float16),
        "INT8": np.array([-1], np.int8),
        "UINT64": np.array([1 << 63], np.uint64),
        "BOOL": np.array([[True, False]]),
    }
    inputs = []
    for name, array in arrays.items():
        inputs.append(triton.InferInput(name, array.shape, "BYTES" if name == "TEXT" else name))
        inputs[-1].set_data_from_numpy(array)
    result = client.infer("echo", inputs, parameters={"a": 1, "b": "x", "c": True, "d": 0.5})
    for name, array in arrays.items():
        assert np.array_equal(result.as_numpy(f"OUT_{name}"), array), name
    found = {k: v.WhichOneof("parameter_choice") for k, v in
             result.get_response().parameters.items()}  # fmt: skip
    assert found == {
        "a": "int64_param", "b": "string_param", "c": "bool_param", "d": "double_param",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [("TEXT", "bytes_contents", [b"a", b""]), ("FP32", "fp32_contents", [0.5, 2.0]),
     ("INT8", "int_contents", [-3, 4]), ("INT64", "int64_contents", [1 << 40, 0]),
     ("UINT64", "uint64_contents", [1 << 63, 0]), ("BOOL", "bool_contents", [True, False])],
)  # fmt: skip
def test_explicit_contents_equal_raw_ones(stub, name, field, values):
    message = pb.ModelInferRequest(model_name="echo")
    tensor = message.inputs.add(
        name=name,
        datatype="BYTES" if name == "TEXT" else name,
        shape=[1, 2] if name == "BOOL" else [2],
    )
    getattr(tensor.contents, field).extend(values)
    output = stub.ModelInfer(message).raw_output_contents[0]
    if name == "TEXT":
        assert output == b"\x01\x00\x00\x00a\x00\x00\x00\x00"
    else:
        dtype = {"BOOL": "?", "FP32": "f4", "INT8": "i1", "INT64": "i8", "UINT64": "u8"}[name]
        assert np.frombuffer(output, dtype).tolist() == values


def test_requested_outputs_are_the_only_ones(client):
    inputs = [triton.InferInput("INT8", [1], "INT8"), triton.InferInput("INT64", [1], "INT64")]
    inputs[0].set_data_from_numpy(np.array([3], np.int8))
    inputs[1].set_data_from_numpy(np.array([4], np.int64))
    wanted = [triton.InferRequestedOutput("OUT_INT64")]
    response = client.infer("echo", inputs, outputs=wanted).get_response()
    assert [output.name for output in response.outputs] == ["OUT_INT64"]
    assert len(response.raw_output_contents) == 1


def test_extra_raw_contents_are_ignored(stub):
    message = x_message()
    message.raw_input_contents.append(b"more")
    assert stub.ModelInfer(message).outputs


def test_unknown_models_and_versions_have_the_error_texts_of_triton(stub):
    assert refusal(lambda: stub.ModelInfer(x_message(model_name="x"))) == (
        "NOT_FOUND", "Request for unknown model: 'x' is not found",
    )  # fmt: skip
    assert refusal(lambda: stub.ModelMetadata(pb.ModelMetadataRequest(name="x")))[0] == (
        "NOT_FOUND"
    )
    assert refusal(lambda: stub.ModelReady(pb.ModelReadyRequest(name="x")))[0] == "NOT_FOUND"
    code, text = refusal(lambda: stub.ModelInfer(x_message(model_version="x")))
    assert code == "INVALID_ARGUMENT"
    assert text.startswith("failed to get model version from specified version string 'x'")
    assert refusal(lambda: stub.ModelInfer(x_message(model_version="-1"))) == (
        "INVALID_ARGUMENT",
        "invalid model version specified '-1' , version should be an integral value > 0",
    )
    assert refusal(lambda: stub.ModelStatistics(pb.ModelStatisticsRequest(name="x"))) == (
        "INVALID_ARGUMENT", "requested model 'x' is not available",
    )  # fmt: skip


def test_infer_on_a_decoupled_model_is_unimplemented(stub):
    assert refusal(lambda: stub.ModelInfer(x_message(model_name="repeat"))) == (
        "UNIMPLEMENTED",
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    )


def contents_too(message):
    message.inputs[0].contents.int_contents.extend([1, 2])


def no_data(message):
    del message.raw_input_contents[:]


def wrong_contents(message):
    del message.raw_input_contents[:]
    message.inputs[0].contents.fp32_contents.extend([1, 2])


def wrong_datatype(message):
    message.inputs[0].datatype = "INT33"


def open_shape(message):
    message.inputs[0].shape[:] = [-1, 2]


def text_timeout(message):
    message.parameters["timeout"].string_param = "5"


def reserved_name(message):
    message.parameters["triton_x"].bool_param = True


def unsigned_custom(message):
    message.parameters["x"].uint64_param = 1


def zero_classes(message):
    message.outputs.add(name="Y").parameters["classification"].int64_param = 0


def unknown_region(message):
    message.inputs[0].parameters["shared_memory_region"].string_param = "r"
    message.inputs[0].parameters["shared_memory_byte_size"].int64_param = 4


def numbered_region(message):
    message.inputs[0].parameters["shared_memory_region"].int64_param = 5


@pytest.mark.parametrize(
    ("spoil", "code", "text"),
    [
        (contents_too, "INVALID_ARGUMENT", "contents field must not be specified when using "
         "raw_input_contents for 'X' for model 'double'"),
        (no_data, "INVALID_ARGUMENT", "unable to find data for input tensor 'X' for model "
         "'double' in request."),
        (wrong_contents, "INVALID_ARGUMENT", "unexpected explicit tensor data for input tensor "
         "'X' for model 'double' of type 'FP32', expected datatype 'INT32'"),
        (wrong_datatype, "INVALID_ARGUMENT", "[request id: 7] inference input 'X' data-type is "
         "'<invalid>', but model 'double' expects 'INT32'"),
        (open_shape, "INVALID_ARGUMENT", "[request id: 7] All input dimensions should be "
         "specified for input 'X' for model 'double', got [-1,2]"),
        (text_timeout, "INVALID_ARGUMENT", "invalid value type for 'timeout' parameter, "
         "expected int64_param."),
        (reserved_name, "INVALID_ARGUMENT", "parameter keys starting with 'triton_' are "
         "reserved for Triton usage. Only the following keys starting with 'triton_' are "
         "allowed: triton_enable_empty_final_response"),
        (unsigned_custom, "INVALID_ARGUMENT", "invalid value type for 'x' parameter, expected "
         "int64_param, bool_param, or string_param."),
        (zero_classes, "INVALID_ARGUMENT", "invalid value for 'classification' parameter, "
         "expected >= 0"),
        (unknown_region, "NOT_FOUND", "Unable to find shared memory region: 'r'"),
        (numbered_region, "INVALID_ARGUMENT", "invalid value type for 'shared_memory_region' "
         "parameter for tensor 'X', expected string_param."),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_with_the_text_that_clients_know(stub, spoil, code, text):
    message = x_message()
    spoil(message)
    assert refusal(lambda: stub.ModelInfer(message)) == (code, text)


@pytest.mark.parametrize(
    ("kind", "code"),
    [("INTERNAL", "INTERNAL"), ("INVALID_ARG", "INVALID_ARGUMENT"),
     ("UNAVAILABLE", "UNAVAILABLE"), ("UNSUPPORTED", "UNIMPLEMENTED"),
     ("NOT_FOUND", "NOT_FOUND"), ("CANCELLED", "CANCELLED"), ("UNKNOWN", "UNKNOWN"),
     ("ALREADY_EXISTS", "ALREADY_EXISTS")],
)  # fmt: skip
def test_an_error_of_a_model_has_the_code_of_its_kind(stub, kind, code):
    message = failing(kind.encode())
    assert refusal(lambda: stub.ModelInfer(message)) == (code, f"failed as {kind}")


def test_a_bug_in_a_model_is_an_internal_error_and_the_server_continues(stub):
    assert refusal(lambda: stub.ModelInfer(failing(b"bug")))[0] == "INTERNAL"
    assert stub.ServerLive(pb.ServerLiveRequest()).live


def test_invalid_utf8_in_error_texts_is_escaped(fresh_server):
    message = failing(b"NOT_FOUND:no file caf\xe9")
    unavailable = VersionState.UNAVAILABLE
    registry = fresh_server.service.registry
    registry.set_state("asleep", "1", unavailable, "no file caf\udce9")
    with grpc.insecure_channel(fresh_server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        text = "no file caf\\udce9"
        assert refusal(lambda: stub.ModelInfer(message)) == ("NOT_FOUND", text)
        assert [r.error_message for r in stub.ModelStreamInfer(iter([message]))] == [text]
        ending = stub.ModelStreamInfer(
            iter([message]), metadata=[("triton_grpc_error", "true")]
        )
        assert refusal(lambda: list(ending)) == ("NOT_FOUND", text)
        index = stub.RepositoryIndex(pb.RepositoryIndexRequest())
        assert text in [model.reason for model in index.models]


@pytest.mark.parametrize("line", ["a line of a traceback", "Größe", "\n", "100 %"])
def test_a_long_error_text_keeps_its_beginning_and_end(stub, line):
    lines = "\n".join([line] * 10_000)
    message = failing(f"NOT_FOUND:begin\n{lines}\nend".encode())
    code, text = refusal(lambda: stub.ModelInfer(message))
    assert code == "NOT_FOUND"
    assert text.startswith(f"begin\n{line}") and text.endswith(f"{line}\nend")
    ending = stub.ModelStreamInfer(iter([message]), metadata=[("triton_grpc_error", "true")])
    assert refusal(lambda: list(ending)) == (code, text)
    # A message may have any length.
    (answer,) = stub.ModelStreamInfer(iter([message]))
    assert answer.error_message == f"begin\n{lines}\nend"


def test_the_health_service_reports_serving_while_ready(server):
    with grpc.insecure_channel(server.grpc_url) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"") == b"\x08\x01"
        server.asleep.is_ready = False
        try:
            assert check(b"") == b"\x08\x02"
        finally:
            server.asleep.is_ready = True
        assert refusal(lambda: channel.unary_unary("/grpc.health.v1.Health/Watch")(b""))[0] == (
            "UNIMPLEMENTED"
        )


def test_repository_names_and_control_are_refused(stub):
    named = pb.RepositoryIndexRequest(repository_name="r")
    assert refusal(lambda: stub.RepositoryIndex(named)) == (
        "UNIMPLEMENTED", "'repository_name' specification is not supported",
    )  # fmt: skip
    load = pb.RepositoryModelLoadRequest(model_name="echo")
    assert refusal(lambda: stub.RepositoryModelLoad(load)) == (
        "UNAVAILABLE", "explicit model load / unload is not allowed if polling is enabled",
    )  # fmt: skip


def test_shared_memory_is_refused_as_a_disabled_feature(client):
    with pytest.raises(InferenceServerException, match="Client shared memory is disabled"):
        client.register_system_shared_memory("r", "/r", 8)
    assert not client.get_system_shared_memory_status().regions


def test_trace_settings_are_lists_of_strings_and_an_empty_list_resets_a_setting(client):
    changes = {"trace_rate": "7", "trace_level": ["OFF"]}
    settings = client.update_trace_settings("echo", changes).settings
    assert settings["trace_rate"].value == ["7"]
    assert client.get_trace_settings().settings["trace_rate"].value == ["1000"]
    settings = client.update_trace_settings("echo", {"trace_rate": None}).settings
    assert settings["trace_rate"].value == ["1000"]
    with pytest.raises(InferenceServerException, match="trace file name is not given"):
        client.update_trace_settings(settings={"trace_level": ["TENSORS"]})


def test_log_settings_change_by_type(client, stub):
    settings = client.update_log_settings({"log_verbose_level": 1}).settings
    assert settings["log_verbose_level"].uint32_param == 1
    client.update_log_settings({"log_verbose_level": 0})
    # Other keys are ignored, like over HTTP.
    other = pb.LogSettingsRequest()
    other.settings["log_colour"].string_param = "red"
    assert stub.LogSettings(other) == client.get_log_settings()
    wrong = pb.LogSettingsRequest()
    wrong.settings["log_info"].string_param = "x"
    assert refusal(lambda: stub.LogSettings(wrong)) == (
        "INVALID_ARGUMENT",
        "expect boolean for 'log_info'",
    )
    wrong = pb.LogSettingsRequest()
    wrong.settings["log_format"].string_param = "x"
    assert refusal(lambda: stub.LogSettings(wrong)) == (
        "INVALID_ARGUMENT",
        "invalid argument for log_format, got: x",
    )


def test_a_log_level_beyond_those_of_grpc_is_the_highest_grpc_level(client, server):
    assert server.post("/v2/logging", {"log_verbose_level": 1 << 40}).status == 200
    try:
        settings = client.get_log_settings().settings
        assert settings["log_verbose_level"].uint32_param == (1 << 32) - 1
    finally:
        server.post("/v2/logging", {"log_verbose_level": 0})


def test_messages_of_40_megabytes_pass_in_both_directions(client):
    data = np.arange(40 << 20, dtype=np.uint32).astype(np.int8)
    tensor = triton.InferInput("INT8", data.shape, "INT8")
    tensor.set_data_from_numpy(data)
    assert np.array_equal(client.infer("echo", [tensor]).as_numpy("OUT_INT8"), data)


def test_a_cancelled_call_ends_its_request(fresh_server):
    answers = queue.Queue()
    fresh_server.repeat.is_decoupled = False
    client = triton.InferenceServerClient(fresh_server.grpc_url)
    inputs = [
        triton.InferInput("text_input", [1, 1], "BYTES"),
        triton.InferInput("max_tokens", [1, 1], "INT32"),
        triton.InferInput("delay_ms", [1, 1], "INT32"),
    ]
    inputs[0].set_data_from_numpy(np.array([[b"a"]], object))
    inputs[1].set_data_from_numpy(np.array([[1]], np.int32))
    inputs[2].set_data_from_numpy(np.array([[3_600_000]], np.int32))
    call = client.async_infer("repeat", inputs, lambda result, error: answers.put(error))
    fresh_server.wait_until(lambda: fresh_server.repeat.num_running == 1)
    call.cancel()
    assert answers.get(timeout=60).status() == "StatusCode.CANCELLED"
    fresh_server.wait_until(lambda: fresh_server.repeat.num_running == 0)
    assert fresh_server.repeat.num_ended_early == 1
    client.close()


@pytest.mark.parametrize("kind", ["ModelInfer", "ModelStreamInfer"])
def test_an_invalid_message_is_an_error_of_the_caller_without_traceback(server, caplog, kind):
    path = f"/inference.GRPCInferenceService/{kind}"
    with caplog.at_level("INFO"), grpc.insecure_channel(server.grpc_url) as channel:
        if kind == "ModelInfer":
            code, text = refusal(lambda: channel.unary_unary(path)(b"\xff\xff"))
        else:
            call = channel.stream_stream(path)(iter([b"\xff\xff"]))
            code, text = refusal(lambda: list(call))
    assert code == "INTERNAL"
    assert text.startswith("the message cannot be decoded: ")
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
