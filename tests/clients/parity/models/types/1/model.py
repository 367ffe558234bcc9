"""Gives each input back as the output of the same type."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One response a request."""

    def execute(self, requests):
        """Answer a batch."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        wanted = set(request.requested_output_names())
        outputs = []
        for tensor in request.inputs():
            name = tensor.name().replace("IN_", "OUT_")
            if name in wanted:
                outputs.append(pb_utils.Tensor(name, tensor.as_numpy()))
        return pb_utils.InferenceResponse(output_tensors=outputs)
