"""Asks the ensemble three times at once; its calls wait side by side."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        text = request.inputs()[0].as_numpy()
        asked = [self.ask(text, length).async_exec(decoupled=True) for length in (1, 2, 3)]
        answers = []
        for responses in await asyncio.gather(*asked):
            async for response in responses:
                if response.has_error():
                    return pb_utils.InferenceResponse(error=response.error())
                answers.append(response.output_tensors()[0].as_numpy().item())
        data = np.array([answers], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("answers", data)])

    def ask(self, text, length):
        return pb_utils.InferenceRequest(
            model_name="ensemble",
            inputs=[
                pb_utils.Tensor("text_input", text),
                pb_utils.Tensor("max_tokens", np.array([[length]], np.int32)),
                pb_utils.Tensor("exclude_input_in_output", np.array([[True]])),
            ],
            requested_output_names=["text_output"],
        )
