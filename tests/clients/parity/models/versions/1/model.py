"""Gives ten times its numbers back."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One response a request."""

    def execute(self, requests):
        """Answer a batch."""
        answers = []
        for request in requests:
            values = 10 * pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            output = pb_utils.Tensor("OUT", values)
            answers.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return answers
