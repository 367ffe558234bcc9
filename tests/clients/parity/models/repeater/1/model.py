"""Answers with as many responses as a request asks for."""

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Decoupled."""

    def execute(self, requests):
        """Answer a batch."""
        for request in requests:
            self._answer(request)

    def _answer(self, request):
        sender = request.get_response_sender()
        count = _number(request, "COUNT", 0)
        fail_at = _number(request, "FAIL_AT", -1)
        ends_with_last = bool(_number(request, "FINAL_WITH_LAST", 0))
        for index in range(count):
            if index == fail_at:
                error = pb_utils.TritonError(f"failed at {index}")
                sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
                return
            output = pb_utils.Tensor("INDEX", np.array([index], np.int32))
            response = pb_utils.InferenceResponse(output_tensors=[output])
            if ends_with_last and index == count - 1:
                sender.send(response, flags=FINAL)
                return
            sender.send(response)
        sender.send(flags=FINAL)


def _number(request, name, default):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else int(tensor.as_numpy()[0])
