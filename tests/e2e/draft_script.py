"""The code of a BLS model: rounds of a draft and a target model, in the way of user scripts.

Each round appends the new ids to the prompt.
"""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils


def _ask(model, outputs, inputs):
    request = pb_utils.InferenceRequest(
        model_name=model,
        inputs=[pb_utils.Tensor(name, value) for name, value in inputs.items()],
        requested_output_names=outputs,
    )
    response = request.exec(decoupled=False)
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def _generate(model, ids, count, before, **more):
    inputs = {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        "request_output_len": np.array([[count]], np.int32),
        "end_id": before["OUT_END_ID"],
        "pad_id": before["OUT_PAD_ID"],
        **more,
    }
    outputs = _ask(model, ["output_ids", "sequence_length"], inputs)
    return outputs["output_ids"][0, 0, : outputs["sequence_length"][0, 0]].tolist()


class TritonPythonModel:
    """Answers one text with one text."""

    def execute(self, requests):
        """The responses to requests."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        def value(name):
            return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

        before = _ask(
            "preprocessing",
            ["INPUT_ID", "REQUEST_INPUT_LEN", "OUT_END_ID", "OUT_PAD_ID"],
            {"QUERY": value("text_input"), "REQUEST_OUTPUT_LEN": value("max_tokens")},
        )
        ids = before["INPUT_ID"][0].tolist()
        most = len(ids) + int(value("max_tokens").flat[0])
        num_drafts = int(value("num_draft_tokens").flat[0])
        while len(ids) < most:
            draft, more = ids, {}
            count = min(num_drafts, most - len(ids) - 1)
            if count > 0:
                draft = _generate("tensorrt_llm_draft", ids, count, before,
                                  min_length=np.array([[count]], np.int32))  # fmt: skip
                more = {"draft_input_ids": np.array([draft[len(ids) :]], np.int32)}
            target = _generate("tensorrt_llm", ids, len(draft) - len(ids) + 1, before, **more)
            if target in (ids, draft):
                break
            ids = target
        after = _ask(
            "postprocessing",
            ["OUTPUT"],
            {"TOKENS_BATCH": np.array([[ids]], np.int32),
             "SEQUENCE_LENGTH": np.array([[len(ids)]], np.int32)},
        )  # fmt: skip
        text = pb_utils.Tensor("text_output", after["OUTPUT"])
        return pb_utils.InferenceResponse(output_tensors=[text])
