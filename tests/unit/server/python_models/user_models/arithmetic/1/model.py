"""Adds and subtracts in one call, and answers wrong requests one by one."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils
from helpers import FACTOR

from .helpers import FACTOR as SAME_FACTOR


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        return config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        assert FACTOR == SAME_FACTOR
        assert (args["model_name"], args["model_version"]) == ("arithmetic", "1")
        assert args["model_instance_name"] == "arithmetic_0_0"
        assert not pb_utils.using_decoupled_model_transaction_policy(config)
        output = pb_utils.get_output_config_by_name(config, "SUM")
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])
        self.offset = float(config["parameters"]["offset"]["string_value"])

    def execute(self, requests):
        return [self.answer(request, len(requests)) for request in requests]

    def answer(self, request, num_requests):
        first = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        second = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
        word = pb_utils.get_input_tensor_by_name(request, "WORD")
        if (first < 0).any():
            code = pb_utils.TritonError.INVALID_ARG
            text = f"negative, {request.request_id()}, {request.parameters()}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))
        if np.isnan(first).any():
            raise ValueError("not a number")
        dtype = np.float64 if np.isinf(first).any() else self.dtype
        outputs = [
            pb_utils.Tensor("SUM", (first + second + self.offset).astype(dtype)),
            pb_utils.Tensor("DIFFERENCE", FACTOR * (first - second)),
            pb_utils.Tensor("BATCH", np.full((len(first), 1), num_requests, np.int32)),
        ]
        if word is not None:
            outputs.append(pb_utils.Tensor("WORD_BACK", word.as_numpy()))
        return pb_utils.InferenceResponse(outputs)
