"""``POST .../infer`` as clients see it."""

import gzip
import json
import zlib

import numpy as np
import pytest
import tritonclient.http as triton


def x_input(**changes):
    return {"name": "X", "shape": [1, 2], "datatype": "INT32", "data": [1, 2], **changes}


def infer(server, document, model="double", headers=None):
    return server.post(f"/v2/models/{model}/infer", document, headers)


def test_json_tensors_are_accepted_and_returned_as_flat_lists(server):
    answer = infer(
        server, {"id": "a", "inputs": [x_input(shape=[2, 2], data=[[1, 2], [3, 4]])]}
    )
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.body == (
        b'{"id":"a","model_name":"double","model_version":"1","outputs":'
        b'[{"name":"Y","datatype":"INT32","shape":[2,2],"data":[2,4,6,8]}]}'
    )


def test_a_response_without_a_request_id_has_no_id(server):
    assert "id" not in infer(server, {"inputs": [x_input()]}).json
    assert "id" not in infer(server, {"id": "", "inputs": [x_input()]}).json


def test_every_json_datatype_survives_a_round_trip(server):
    values = {
        "TEXT": ["", "naïve", "a\u0000b"],
        "FP32": [1.5, -0.25, 1e30],
        "INT8": [-128, 127],
        "INT64": [-(1 << 63), (1 << 63) - 1],
        "UINT64": [0, (1 << 64) - 1],
        "BOOL": [True, False],
    }
    inputs = [
        {
            "name": name,
            "datatype": {"TEXT": "BYTES"}.get(name, name),
            "shape": [1, 2] if name == "BOOL" else [len(data)],
            "data": data,
        }
        for name, data in values.items()
    ]
    outputs = infer(server, {"inputs": inputs}, "echo").json["outputs"]
    found = {output["name"]: output["data"] for output in outputs}
    assert found.pop("OUT_FP32") == [float(np.float32(value)) for value in values["FP32"]]
    assert found == {f"OUT_{name}": data for name, data in values.items() if name != "FP32"}


def test_invalid_utf8_bytes_pass_through(server):
    body = b'{"inputs":[{"name":"TEXT","datatype":"BYTES","shape":[1],"data":["\xff\xfe"]}]}'
    assert b'"data":["\xff\xfe"]' in infer(server, body, "echo").body


def test_tritonclient_sends_and_receives_every_binary_datatype(server):
    client = triton.InferenceServerClient(server.http_url)
    arrays = {
        "TEXT": np.array([b"", b"\xff\x00a", "ü".encode()], object),
        "FP32": np.array([1.5, np.inf], np.float32),
        "FP16": np.array([0.5], np.float16),
        "INT8": np.array([-1], np.int8),
        "INT64": np.array([1 << 40], np.int64),
        "UINT64": np.array([1 << 63], np.uint64),
        "BOOL": np.array([[True, False]]),
    }
    inputs = []
    for name, array in arrays.items():
        inputs.append(triton.InferInput(name, array.shape, "BYTES" if name == "TEXT" else name))
        inputs[-1].set_data_from_numpy(array)
    result = client.infer("echo", inputs, request_id="7")
    assert result.get_response()["id"] == "7"
    for name, array in arrays.items():
        assert np.array_equal(result.as_numpy(f"OUT_{name}"), array), name
    client.close()


def test_each_requested_output_has_its_requested_form(server):
    client = triton.InferenceServerClient(server.http_url)
    inputs = [triton.InferInput("INT8", [1], "INT8"), triton.InferInput("INT64", [1], "INT64")]
    inputs[0].set_data_from_numpy(np.array([3], np.int8), binary_data=False)
    inputs[1].set_data_from_numpy(np.array([4], np.int64), binary_data=True)
    outputs = [triton.InferRequestedOutput("OUT_INT64", binary_data=False)]
    result = client.infer("echo", inputs, outputs=outputs)
    assert [output["name"] for output in result.get_response()["outputs"]] == ["OUT_INT64"]
    assert result.as_numpy("OUT_INT64").tolist() == [4]
    client.close()


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_tritonclient_may_compress_both_ways(server, coding):
    client = triton.InferenceServerClient(server.http_url)
    data = np.arange(8, dtype=np.int32).reshape(4, 2)
    tensor = triton.InferInput("X", data.shape, "INT32")
    tensor.set_data_from_numpy(data)
    result = client.infer(
        "double",
        [tensor],
        request_compression_algorithm=coding,
        response_compression_algorithm=coding,
    )
    assert np.array_equal(result.as_numpy("Y"), data * 2)
    client.close()


@pytest.mark.parametrize(
    ("accepted", "chosen", "decode"),
    [
        ("gzip, deflate", "gzip", gzip.decompress),
        ("br, gzip;q=0.5, deflate;q=0.9", "deflate", zlib.decompress),
        ("identity, gzip", None, bytes),
        ("br", None, bytes),
    ],
)
def test_the_response_has_the_best_accepted_coding(server, accepted, chosen, decode):
    answer = infer(server, {"inputs": [x_input()]}, headers={"Accept-Encoding": accepted})
    assert answer.headers["Content-Encoding"] == chosen
    assert json.loads(decode(answer.body))["outputs"][0]["data"] == [2, 4]


def test_an_unknown_request_coding_is_501_and_names_the_known_ones(server):
    answer = infer(server, b"x", headers={"Content-Encoding": "br"})
    assert (answer.status, answer.error) == (501, "Unsupported compression type")
    assert answer.headers["Accept-Encoding"] == "gzip, deflate"


def test_a_compressed_body_may_not_grow_over_the_input_limit(server):
    body = gzip.compress(b" " * (65 << 20))
    answer = infer(server, body, headers={"Content-Encoding": "gzip"})
    assert answer.status == 400
    assert answer.error.startswith("Decompressed data size exceeds the maximum allowed")


@pytest.mark.parametrize("cut", [10, None], ids=["cut", "whole"])
def test_a_body_of_several_gzip_streams_is_refused(server, cut):
    body = json.dumps({"inputs": [x_input()]}).encode()
    parts = gzip.compress(body[:cut]) + gzip.compress(body[cut:] if cut else b" ")
    answer = infer(server, parts, headers={"Content-Encoding": "gzip"})
    assert (answer.status, answer.error) == (
        400,
        "failed to decompress the request: it is several gzip streams one after the other. "
        "Compress it as one.",
    )


def test_a_raw_request_is_the_only_input_and_is_answered_in_binary(server):
    header = {"Inference-Header-Content-Length": "0"}
    answer = infer(server, b"hello", "raw", header)
    length = int(answer.headers["Inference-Header-Content-Length"])
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert json.loads(answer.body[:length])["outputs"][0]["shape"] == [1]
    assert answer.body[length:] == b"\x05\x00\x00\x00hello"
    assert infer(server, b"", "raw").status == 200


def test_a_raw_request_needs_a_model_with_one_input(server):
    answer = infer(server, b"", "echo")
    assert answer.status == 400
    assert answer.error.startswith(
        "[request id: <id_unknown>] Raw request must only have 1 input"
    )


def test_request_parameters_reach_the_model_and_response_parameters_are_returned(server):
    parameters = {"a": 1, "b": "x", "c": True, "d": 0.5, "priority": 3, "sequence_id": "s"}
    document = {"inputs": [], "parameters": parameters}
    assert infer(server, document, "echo").json["parameters"] == {
        "a": 1, "b": "x", "c": True, "d": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "seen"),
    [(-(2**63), -(2**63)), (2**63 - 1, 2**63 - 1), (2**63, 2.0**63), (-(10**30), -1e30)],
)
def test_a_parameter_beyond_64_bit_integers_is_a_double(server, value, seen):
    document = {"inputs": [], "parameters": {"a": value}}
    (found,) = infer(server, document, "echo").json["parameters"].values()
    assert (found, type(found)) == (seen, type(seen))


def test_a_configured_reshape_is_what_the_model_sees(server):
    tensor = {"name": "X", "shape": [3, 1], "datatype": "INT32", "data": [1, 2, 3]}
    assert infer(server, {"inputs": [tensor]}, "squeeze").json["outputs"][0]["data"] == [3]


def test_classification_gives_the_best_values_with_their_indices(server):
    document = {
        "inputs": [{"name": "FP32", "shape": [3], "datatype": "FP32", "data": [0.5, 4, 2]}],
        "outputs": [{"name": "OUT_FP32", "parameters": {"classification": 2}}],
    }
    (output,) = infer(server, document, "echo").json["outputs"]
    assert output["datatype"] == "BYTES"
    assert output["shape"] == [2]
    assert output["data"] == ["4.000000:1", "2.000000:2"]


@pytest.mark.parametrize(
    ("document", "status", "text"),
    [
        (b" ", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        (b'{"inputs":', 500, "failed to parse the request JSON buffer: Invalid value. at 10"),
        (
            {},
            500,
            "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'",
        ),
        ({"id": 7}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
        (
            {"inputs": [x_input(shape=[-1, 2])]},
            500,
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as "
            "unsigned-integer",
        ),
        (
            {"inputs": [x_input(data="x")]},
            500,
            "Unable to parse 'data': attempt to access JSON non-array as array",
        ),
        (
            {"inputs": [x_input(data=[1, "2"])]},
            500,
            "Unable to parse 'data': attempt to access JSON non-signed-integer as "
            "signed-integer",
        ),
        (
            {"inputs": [x_input(datatype="BOOL", data=[1, 0])]},
            500,
            "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
        ),
        (
            {"inputs": [x_input(datatype="FP32", data=["a", 0])]},
            500,
            "Unable to parse 'data': attempt to access JSON non-number as double",
        ),
        (
            {"inputs": [x_input(datatype="FP32", data=[10**400, 0])]},
            500,
            "failed to parse the request JSON buffer: Number too big to be stored in double. "
            "at 0",
        ),
        (
            {"inputs": [x_input()], "parameters": {"a": 10**400}},
            500,
            "failed to parse the request JSON buffer: Number too big to be stored in double. "
            "at 0",
        ),
        (
            {"inputs": [x_input(datatype="BYTES", data=["a", 0])]},
            500,
            "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
        ),
        (
            {"inputs": [x_input(data=[1, 2, 3])]},
            500,
            "Unable to parse 'data': Shape does not match true shape of 'data' field",
        ),
        (
            {"inputs": [{"name": "X", "shape": [1, 2], "datatype": "INT32"}]},
            400,
            "Input must set only one of the following fields: 'data', 'binary_data_size' in "
            "'parameters', 'shared_memory_region' in 'parameters'. But no field is set",
        ),
        (
            {"inputs": [x_input(parameters={"binary_data_size": 8})]},
            400,
            "Input must set only one of the following fields: 'data', 'binary_data_size' in "
            "'parameters', 'shared_memory_region' in 'parameters'. But set 'data' "
            "'binary_data_size'",
        ),
        ({"inputs": [x_input(datatype="INT33")]}, 400, "invalid datatype for input X"),
        (
            {"inputs": [x_input(shape=[1 << 32, 1 << 31])]},
            400,
            "invalid shape for input 'X': shape [4294967296,2147483648] has more than "
            "9223372036854775807 elements",
        ),
        (
            {"inputs": [x_input(datatype="FP16")]},
            400,
            "receiving FP16 data via JSON is not supported. Please use the binary data format "
            "for input X",
        ),
        (
            {"inputs": [x_input()], "parameters": {"priority": "high"}},
            500,
            "Unable to parse 'priority': attempt to access JSON non-unsigned-integer as "
            "unsigned-integer",
        ),
        (
            {"inputs": [x_input()], "parameters": {"l": []}},
            400,
            "parameter 'l' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (
            {"inputs": [x_input()], "outputs": [{"name": "Q"}]},
            400,
            "unexpected inference output 'Q' for model 'double'",
        ),
        (
            {"inputs": [{"name": "X", "shape": [1, 2], "datatype": "INT32",
                         "parameters": {"shared_memory_region": "r"}}]},
            404,
            "Unable to find shared memory region: 'r'",
        ),
    ],
)  # fmt: skip
def test_a_wrong_body_is_refused_with_the_text_that_clients_know(
    server, document, status, text
):
    answer = infer(server, document)
    assert (answer.error, answer.status) == (text, status)


def test_reserved_parameter_names_are_refused(server):
    answer = infer(server, {"inputs": [x_input()], "parameters": {"triton_x": 1}})
    assert answer.status == 400
    assert answer.error.startswith("parameter keys starting with 'triton_' are reserved")


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("9999", "inference header size should be in range (0, 98), got: 9999"),
        ("-1", "inference header size should be in range (0, 98), got: -1"),
        ("abc", "Unable to parse Inference-Header-Content-Length, got: abc"),
        ("99999999999", "Unable to parse Inference-Header-Content-Length, got: 99999999999"),
    ],
)
def test_a_wrong_header_length_is_400(server, header, text):
    answer = infer(server, b" " * 98, headers={"Inference-Header-Content-Length": header})
    assert (answer.status, answer.error) == (400, text)


@pytest.mark.parametrize(
    ("blob", "size", "text"),
    [
        (b"1234", 8, "unexpected size for input 'X', expecting 4 additional bytes for model "
         "'double'"),
        (b"123456789", 8, "unexpected additional input data for model 'double'"),
        (b"1234567", 7, "[request id: <id_unknown>] input byte size mismatch for input 'X' for "
         "model 'double'. Expected 8, got 7"),
    ],
)  # fmt: skip
def test_binary_data_of_the_wrong_size_is_refused(server, blob, size, text):
    tensor = x_input(parameters={"binary_data_size": size})
    del tensor["data"]
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = infer(server, head + blob, headers=headers)
    assert (answer.status, answer.error) == (400, text)


def test_infer_on_a_decoupled_model_is_501(server):
    answer = infer(server, {}, "repeat")
    assert (answer.status, answer.error) == (
        501, "HTTP end point doesn't support models with decoupled transaction policy",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "status"),
    [("INTERNAL", 500), ("INVALID_ARG", 400), ("UNAVAILABLE", 503), ("UNSUPPORTED", 501),
     ("NOT_FOUND", 404), ("CANCELLED", 400), ("UNKNOWN", 400), ("ALREADY_EXISTS", 400)],
)  # fmt: skip
def test_an_error_of_a_model_has_the_status_of_its_kind(server, kind, status):
    tensor = {"name": "KIND", "shape": [1], "datatype": "BYTES", "data": [kind]}
    answer = infer(server, {"inputs": [tensor]}, "fail")
    assert (answer.status, answer.error) == (status, f"failed as {kind}")


def test_a_dead_group_is_503_with_a_retry_time(server):
    tensor = {"name": "KIND", "shape": [1], "datatype": "BYTES", "data": ["dead"]}
    answer = infer(server, {"inputs": [tensor]}, "fail")
    assert answer.status == 503
    assert int(answer.headers["Retry-After"]) > 0


def test_a_bug_in_a_model_is_500_and_the_server_continues(server):
    tensor = {"name": "KIND", "shape": [1], "datatype": "BYTES", "data": ["bug"]}
    assert infer(server, {"inputs": [tensor]}, "fail").status == 500
    assert server.get("/v2/health/live").status == 200
