"""Adds and subtracts rows of numbers."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One response a request."""

    def execute(self, requests):
        """Answer a batch."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        a, b = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("A", "B")
        )
        outputs = [
            pb_utils.Tensor("SUM", (a + b).astype(np.int32)),
            pb_utils.Tensor("DIFFERENCE", (a - b).astype(np.float32)),
        ]
        return pb_utils.InferenceResponse(output_tensors=outputs)
