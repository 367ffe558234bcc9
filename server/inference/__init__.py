"""Requests, responses and tensors, free of any wire and of any model.

Owns `InferRequest`, `InferResponse`, `Tensor`, validation, admission and the registry.
In: wire inputs and a model's configuration.
Out: checked requests for models; the registry says which model takes one.
Long work runs in pieces, so that streams go on.
"""
