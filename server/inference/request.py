"""One inference request and its responses, free of any wire format."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

ParameterValue = str | int | bool | float


@dataclass(slots=True)
class Tensor:
    """A named array. ``BYTES`` tensors hold ``bytes`` objects in an object array.

    ``BF16`` is held as uint16 bit patterns.
    """

    name: str
    datatype: str
    """Protocol name: BOOL, INT32, FP32, BYTES and so on."""
    data: np.ndarray[Any, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch dimension included, if the model batches."""
        shape: tuple[int, ...] = self.data.shape
        return shape


@dataclass(slots=True, kw_only=True)
class InferRequest:
    """A validated request: inputs fit the model's config."""

    model_name: str
    model_version: str = ""
    """As the client gave it; empty means the latest."""
    id: str = ""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    """Requested outputs; empty means all."""
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    """Custom parameters."""
    priority: int = 0
    timeout_us: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    arrival_ns: int = 0
    """``time.monotonic_ns()`` when the request was complete."""
    handed_ns: int = 0
    """Arrival at the composed model that sent this request to a step; 0 for a client's request.
    """
    parent: InferRequest | None = None
    """The request of the composed model that sent this request to a step."""
    steps_input_ns: int = 0
    """Time that the steps of a composed model have spent on their inputs: a part of the
    request's own time for inputs, as in Triton. The other phases are counted alike.
    """
    steps_queue_ns: int = 0
    steps_infer_ns: int = 0
    steps_output_ns: int = 0
    started_ns: int = 0
    """``time.monotonic_ns()`` when execution began, set by a model with a queue."""
    executed_batch: int | None = None
    """Size of the executed batch, set by a model that batches; 0 where another request of the
    same batch reports the size.
    """

    @property
    def batch_size(self) -> int:
        """The first dimension of the inputs of a model that batches."""
        for tensor in self.inputs.values():
            shape = tensor.data.shape
            return int(shape[0]) if shape else 1
        return 1


@dataclass(slots=True, kw_only=True)
class InferResponse:
    """One response. ``is_final`` may be set on the last response. A model whose iterator ends
    without it has sent a flag-only final response.
    """

    model_name: str
    model_version: str
    id: str = ""
    outputs: list[Tensor] = field(default_factory=list)
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    is_final: bool = False


class Model(Protocol):
    """A served model version.

    `infer` is an async generator. It raises `RequestError`, before or between responses.
    Closing it (``aclose``), or cancelling the task that iterates it, cancels the request
    and frees what it holds within one engine step.
    """

    name: str
    version: str
    config: ModelConfig

    @property
    def is_ready(self) -> bool:
        """Whether a request could run now."""
        ...

    @property
    def is_decoupled(self) -> bool:
        """Whether a request may have any number of responses other than one."""
        ...

    def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        """Run one request."""
        ...


@runtime_checkable
class OneResponseModel(Protocol):
    """A model whose every request has exactly one response, without a generator around it."""

    async def respond(self, request: InferRequest) -> InferResponse:
        """Run one request, as `Model.infer`."""
        ...


@runtime_checkable
class QueueingModel(Protocol):
    """A model whose requests wait in the front end before they are executed."""

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        ...
