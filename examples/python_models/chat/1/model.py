"""A chat: makes a prompt of a question and of earlier turns, and streams the answer.

`execute` is a coroutine, so one process serves any number of chats side by side.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.text_model = parameters["text_model"]["string_value"]

    async def execute(self, requests):
        for request in requests:
            await self.answer(request)

    async def answer(self, request):
        sender = request.get_response_sender()
        responses = await self.text_request(request).async_exec(decoupled=True)
        # Ends early, with an error of the kind CANCELLED, if the client goes away.
        async for response in responses:
            if response.has_error():
                sender.send(pb_utils.InferenceResponse(error=response.error()))
                break
            text = pb_utils.get_output_tensor_by_name(response, "text_output")
            if text is not None:
                answer = pb_utils.Tensor("answer", text.as_numpy())
                sender.send(pb_utils.InferenceResponse([answer]))
        sender.send(flags=FINAL)

    def text_request(self, request):
        question = self.texts(request, "question")[0]
        turns = [*self.texts(request, "earlier"), f"Question: {question}", "Answer:"]
        length = pb_utils.get_input_tensor_by_name(request, "max_tokens").as_numpy()
        tensors = {
            "text_input": np.array([["\n".join(turns).encode()]], dtype=object),
            "max_tokens": length,
            "stream": np.array([[True]]),
            "stop_words": np.array([[b"Question:"]], dtype=object),
        }
        return pb_utils.InferenceRequest(
            model_name=self.text_model,
            request_id=request.request_id(),
            requested_output_names=["text_output"],
            inputs=[pb_utils.Tensor(name, array) for name, array in tensors.items()],
        )

    def texts(self, request, name):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return [] if tensor is None else [item.decode() for item in tensor.as_numpy().flat]
