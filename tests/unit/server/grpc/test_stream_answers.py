"""The answers of a stream as bytes, against the messages of the protobuf library."""

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from trimaran.server.grpc.messages import FINAL, fill_response
from trimaran.server.grpc.stream_answers import StreamEncoder
from trimaran.server.inference.cooperative import run_at_once
from trimaran.server.inference.request import InferResponse, ParameterValue, Tensor
from trimaran.server.inference.tensor_bytes import object_array


def response(
    text: bytes,
    parameters: dict[str, ParameterValue],
    *others: Tensor,
    name: str = "text_output",
) -> InferResponse:
    outputs = [Tensor(name, "BYTES", object_array([text])), *others]
    return InferResponse(
        model_name="ensemble", model_version="1", id="é-7", outputs=outputs,
        parameters=parameters,
    )  # fmt: skip


def by_library(one: InferResponse, is_final: bool) -> pb.ModelStreamInferResponse:
    message = pb.ModelStreamInferResponse()
    run_at_once(fill_response(message.infer_response, one))
    message.infer_response.parameters[FINAL].bool_param = is_final
    return message


def test_every_answer_of_a_stream_equals_the_message_of_the_library():
    index = Tensor("sequence_index", "INT32", np.array([[3]], np.int32))
    probs = Tensor("output_log_probs", "FP32", np.arange(3, dtype=np.float32).reshape(1, 1, 3))
    same: dict[str, ParameterValue] = {"sequence_id": 0, "sequence_start": False}
    encoder = StreamEncoder()
    answers = [
        response(b"", same),
        response(b"a", same),
        response("é".encode() * 40, same),
        response(b"x" * 9000, same, index),
        response(b"b", same, index, probs),
        response(b"b", {"sequence_id": False, "sequence_start": 0}, index, probs),
        response(b"\x00\xff", {"score": 0.5, "name": "n"}),
        response(b"c", {}),
        response(b"d", {}, name="OUTPUT"),
    ]
    for number, one in enumerate(answers):
        for is_final in (False, False, number % 2 == 0):
            found = encoder.encode_short(one, is_final=is_final)
            assert found is not None
            parsed = pb.ModelStreamInferResponse.FromString(found)
            assert parsed == by_library(one, is_final), one
            kinds = {n: p.WhichOneof("parameter_choice")
                     for n, p in parsed.infer_response.parameters.items()}  # fmt: skip
            expected = by_library(one, is_final).infer_response.parameters
            assert kinds == {n: p.WhichOneof("parameter_choice") for n, p in expected.items()}


def test_long_outputs_are_left_to_the_cooperative_way():
    logits = Tensor("generation_logits", "FP32", np.zeros((1, 1, 1, 4096), np.float32))
    texts = Tensor("texts", "BYTES", object_array([b"a", b"b"]))
    encoder = StreamEncoder()

    for one in (
        response(b"a", {}, logits),
        response(b"a", {}, texts),
        response(b"x" * 99999, {}),
    ):
        assert encoder.encode_short(one, is_final=False) is None
