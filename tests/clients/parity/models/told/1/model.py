"""Answers with the facts of a request that a model gets besides tensors."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One response a request."""

    def execute(self, requests):
        """Answer a batch."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        told = {
            "parameters": json.loads(request.parameters() or "{}"),
            "id": request.request_id(),
            "correlation_id": request.correlation_id(),
            "flags": request.flags(),
            "timeout": request.timeout(),
            "outputs": sorted(request.requested_output_names()),
        }
        text = json.dumps(told, sort_keys=True)
        output = pb_utils.Tensor("TOLD", np.array([text.encode()], dtype=object))
        return pb_utils.InferenceResponse(output_tensors=[output])
