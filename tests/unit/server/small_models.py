"""Small models that front ends under test serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import EngineDeadError, ErrorKind, RefusedError, RequestError
from trimaran.server.inference.request import InferRequest, InferResponse, Tensor

ECHO = """
name: "echo" backend: "python"
input { name: "TEXT" data_type: TYPE_STRING dims: -1 optional: true }
input { name: "FP32" data_type: TYPE_FP32 dims: -1 optional: true }
input { name: "FP16" data_type: TYPE_FP16 dims: -1 optional: true }
input { name: "BF16" data_type: TYPE_BF16 dims: -1 optional: true }
input { name: "INT8" data_type: TYPE_INT8 dims: -1 optional: true }
input { name: "INT64" data_type: TYPE_INT64 dims: -1 optional: true }
input { name: "UINT64" data_type: TYPE_UINT64 dims: -1 optional: true }
input { name: "BOOL" data_type: TYPE_BOOL dims: [ -1, 2 ] optional: true }
output { name: "OUT_TEXT" data_type: TYPE_STRING dims: -1 }
output { name: "OUT_FP32" data_type: TYPE_FP32 dims: -1 }
output { name: "OUT_FP16" data_type: TYPE_FP16 dims: -1 }
output { name: "OUT_BF16" data_type: TYPE_BF16 dims: -1 }
output { name: "OUT_INT8" data_type: TYPE_INT8 dims: -1 }
output { name: "OUT_INT64" data_type: TYPE_INT64 dims: -1 }
output { name: "OUT_UINT64" data_type: TYPE_UINT64 dims: -1 }
output { name: "OUT_BOOL" data_type: TYPE_BOOL dims: [ -1, 2 ] }
"""
DOUBLE = """
name: "double" backend: "python" max_batch_size: 4
input { name: "X" data_type: TYPE_INT32 dims: 2 }
output { name: "Y" data_type: TYPE_INT32 dims: 2 }
"""
RAW = """
name: "raw" backend: "python"
input { name: "TEXT" data_type: TYPE_STRING dims: 1 }
output { name: "OUT_TEXT" data_type: TYPE_STRING dims: 1 }
"""
SQUEEZE = """
name: "squeeze" backend: "python" max_batch_size: 4
input { name: "X" data_type: TYPE_INT32 dims: 1 reshape { shape: [ ] } }
output { name: "SEEN" data_type: TYPE_INT32 dims: -1 }
metric_tags { key: "team" value: "7" }
metric_tags { key: "site" value: "a \\"b\\"" }
"""
REPEAT = """
name: "repeat" backend: "python" max_batch_size: 8
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
input { name: "max_tokens" data_type: TYPE_INT32 dims: 1 }
input { name: "delay_ms" data_type: TYPE_INT32 dims: 1 optional: true }
input { name: "fail_at" data_type: TYPE_INT32 dims: 1 optional: true }
input { name: "bad_words" data_type: TYPE_STRING dims: -1 optional: true }
input { name: "stream" data_type: TYPE_BOOL dims: 1 optional: true }
input { name: "has_flag_only_end" data_type: TYPE_BOOL dims: 1 optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: -1 }
output { name: "output_ids" data_type: TYPE_INT32 dims: -1 }
model_transaction_policy { decoupled: true }
"""
FAIL = """
name: "fail" backend: "python"
input { name: "KIND" data_type: TYPE_STRING dims: 1 }
output { name: "Y" data_type: TYPE_INT32 dims: 1 }
"""


class SmallModel:
    """The common base of the models of these tests."""

    version = "1"

    def __init__(self, config: str) -> None:
        self.config = text_format.Parse(config, ModelConfig())
        self.name = self.config.name
        self.is_ready = True
        self.is_decoupled = self.config.model_transaction_policy.decoupled

    def respond(self, **outputs: Tensor) -> InferResponse:
        """A response with these tensors under these names."""
        tensors = [Tensor(name, t.datatype, t.data) for name, t in outputs.items()]
        return InferResponse(model_name=self.name, model_version="1", outputs=tensors)


class EchoModel(SmallModel):
    """Gives back each input under the name OUT_..., and all request parameters."""

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        response = self.respond(**{f"OUT_{n}": t for n, t in request.inputs.items()})
        response.parameters = dict(request.parameters)
        yield response


class DoubleModel(SmallModel):
    """Doubles each value after the requested delay."""

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        await asyncio.sleep(float(request.parameters.get("delay_ms", 0)) / 1e3)
        yield self.respond(Y=Tensor("Y", "INT32", request.inputs["X"].data * 2))


class SqueezeModel(SmallModel):
    """Answers with the shape of its input."""

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        shape = np.array(request.inputs["X"].shape, np.int32)
        yield self.respond(SEEN=Tensor("SEEN", "INT32", shape))


class RepeatModel(SmallModel):
    """Answers ``max_tokens`` times; fails or waits in between on request."""

    def __init__(self, config: str) -> None:
        super().__init__(config)
        self.num_running = 0
        self.num_ended_early = 0
        self.num_responses = 0

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        def scalar(name: str, default: Any) -> Any:
            return request.inputs[name].data.item() if name in request.inputs else default

        count = scalar("max_tokens", 1)
        text, delay_s = scalar("text_input", b""), scalar("delay_ms", 0) / 1e3
        text *= int(request.parameters.get("times", 1))
        self.num_running += 1
        is_complete = False
        try:
            for index in range(count):
                if index == scalar("fail_at", -1):
                    is_complete = True
                    raise RequestError("boom", ErrorKind.INTERNAL)
                if index == request.parameters.get("crash_at"):
                    raise ZeroDivisionError("division by zero")
                if index == request.parameters.get("refuse_at"):
                    raise RefusedError("the queue is full")
                await asyncio.sleep(delay_s)
                response = self.respond(
                    text_output=Tensor("", "BYTES", np.array([text + b" %d" % index], object)),
                    output_ids=Tensor("", "INT32", np.array([index], np.int32)),
                )
                is_last = index == count - 1 and not scalar("has_flag_only_end", False)
                response.is_final = is_last
                self.num_responses += 1
                is_complete = index == count - 1
                yield response
            is_complete = True
        finally:
            self.num_running -= 1
            self.num_ended_early += not is_complete


class FailModel(SmallModel):
    """Fails as its input says: with a kind and perhaps, behind a colon, a text."""

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        asked = request.inputs["KIND"].data.item().decode("utf-8", "surrogateescape")
        kind, _, text = asked.partition(":")
        if kind == "bug":
            raise ZeroDivisionError("division by zero")
        if kind == "dead":
            raise EngineDeadError("the group 'g0' is gone")
        if kind == "full":
            raise RefusedError("the queue is full")
        if kind != "none":
            raise RequestError(text or f"failed as {kind}", ErrorKind[kind])
        return
        yield
