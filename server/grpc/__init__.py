"""The gRPC wire: ``inference.GRPCInferenceService`` and the health service.

Owns the conversion of protobuf messages to requests and of responses to messages.
In: unary calls and ``ModelStreamInfer`` streams.
Out: calls of `Service`, and messages or statuses.
Stubs and messages come from `tritonclient`.
"""
