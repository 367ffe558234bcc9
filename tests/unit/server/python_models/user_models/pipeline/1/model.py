"""Text in, text out, over the models of the repository, one request after another."""

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for text in self.texts(request):
                if isinstance(text, pb_utils.TritonError):
                    sender.send(pb_utils.InferenceResponse(error=text))
                    break
                data = np.array([[text.upper()]], dtype=object)
                tensor = pb_utils.Tensor("answer", data)
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=FINAL)

    def texts(self, request):
        prompt, length = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in ("text", "length")
        )
        before = self.run("preprocessing", QUERY=prompt, REQUEST_OUTPUT_LEN=length).exec()
        ids, num_ids = (
            pb_utils.get_output_tensor_by_name(before, name).as_numpy()
            for name in ("INPUT_ID", "REQUEST_INPUT_LEN")
        )
        tokens = self.run(
            "tensorrt_llm",
            input_ids=ids,
            input_lengths=num_ids,
            request_output_len=length,
            streaming=np.ones((1, 1), bool),
        )
        assert tokens.exec().has_error()
        for response in tokens.exec(decoupled=True):
            if response.has_error():
                yield response.error()
                return
            ids, num_ids = (
                pb_utils.get_output_tensor_by_name(response, name).as_numpy()
                for name in ("output_ids", "sequence_length")
            )
            after = self.run("postprocessing", TOKENS_BATCH=ids, SEQUENCE_LENGTH=num_ids)
            yield after.exec().output_tensors()[0].as_numpy().item().decode()

    def run(self, model, **inputs):
        tensors = [pb_utils.Tensor(name, array) for name, array in inputs.items()]
        return pb_utils.InferenceRequest(
            model_name=model, inputs=tensors, requested_output_names=[], request_id="inner"
        )
