"""Requests, responses and tensors, free of any wire and of any model.

Owns `InferRequest`, `InferResponse`, `Tensor`, validation, admission and the registry. In: wire
inputs and a model's configuration. Out: checked requests for models; the registry finds the
model of a request. Long work is cooperative, so that streams go on.
"""
