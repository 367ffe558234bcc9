"""Fails in the way that a request asks for."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One response a request."""

    def execute(self, requests):
        """Answer a batch."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()[0].decode()
        if text == "raise":
            raise ValueError("raised")
        if text == "model_exception":
            raise pb_utils.TritonModelException("raised for the client")
        if text == "other_output":
            output = pb_utils.Tensor("OTHER", np.zeros(1, np.int32))
            return pb_utils.InferenceResponse(output_tensors=[output])
        if text == "other_type":
            output = pb_utils.Tensor("NEVER", np.zeros(1, np.float32))
            return pb_utils.InferenceResponse(output_tensors=[output])
        if text == "no_output":
            return pb_utils.InferenceResponse(output_tensors=[])
        code = getattr(pb_utils.TritonError, text, None)
        error = (
            pb_utils.TritonError("refused", code)
            if code is not None
            else (pb_utils.TritonError(text))
        )
        return pb_utils.InferenceResponse(error=error)
