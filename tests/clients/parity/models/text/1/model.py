"""Gives a text back."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One response a request."""

    def execute(self, requests):
        """Answer a batch."""
        answers = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            output = pb_utils.Tensor("ECHO", text)
            answers.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return answers
