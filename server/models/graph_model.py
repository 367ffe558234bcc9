"""An ensemble of any models, run step by step as its config connects them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from trimaran.comm.errors import ConfigError, EngineDeadError, RequestError
from trimaran.server.inference.request import (
    InferRequest,
    InferResponse,
    Model,
    ParameterValue,
    Tensor,
)
from trimaran.server.repository.model_repository import RepositoryModel, Role


@dataclass(frozen=True, slots=True)
class GraphStep:
    """One model of the graph, and the ensemble's names for its tensors."""

    model: Model
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]


class GraphModel:
    """Runs the steps in the order of their data dependencies.

    Each response of a step is one iteration of the later steps. Each iteration that reaches the
    end is one response.
    """

    def __init__(
        self, model: RepositoryModel, version: int, steps: Sequence[GraphStep]
    ) -> None:
        """Order the steps.

        Raises:
            ConfigError: the steps form a cycle.
        """
        self.name = model.name
        self.version = str(version)
        self.config = model.config
        self._is_ensemble = model.role is Role.ENSEMBLE
        self._steps = _ordered(model, steps)
        self.is_decoupled = any(step.model.is_decoupled for step in steps)
        if self.is_decoupled:
            self.config.model_transaction_policy.decoupled = True

    @property
    def is_ready(self) -> bool:
        """Whether every step could run now."""
        return all(step.model.is_ready for step in self._steps)

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Run one request; see `inference.Model`."""
        try:
            iterations = self._iterations(request, 0, dict(request.inputs))
            async with aclosing(iterations):
                async for tensors in iterations:
                    yield self._response(request, tensors)
        except RequestError as error:
            if not self._is_ensemble:
                raise
            raise prefixed(f"in ensemble '{self.name}', ", error) from error

    async def _iterations(
        self, request: InferRequest, index: int, tensors: dict[str, Tensor]
    ) -> AsyncGenerator[dict[str, Tensor], None]:
        """All tensors of the ensemble, once for each path through the steps from ``index``."""
        if index == len(self._steps):
            yield tensors
            return
        step = self._steps[index]
        responses = step.model.infer(_inner(request, step, tensors))
        async with aclosing(responses):  # type: ignore[type-var]
            async for response in responses:
                produced = {
                    step.output_map[tensor.name]: tensor
                    for tensor in response.outputs
                    if tensor.name in step.output_map
                }
                if not response.outputs:
                    if not step.model.is_decoupled:
                        # The answer to a stop request, without tensors for later steps.
                        yield tensors
                    continue
                later = self._iterations(request, index + 1, {**tensors, **produced})
                async with aclosing(later):
                    async for complete in later:
                        yield complete

    def _response(self, request: InferRequest, tensors: dict[str, Tensor]) -> InferResponse:
        names = request.outputs or tuple(tensor.name for tensor in self.config.output)
        if self._is_ensemble:
            # As in Triton, whatever the order of the configuration or of the request.
            names = tuple(sorted(names))
        return InferResponse(
            model_name=self.name,
            model_version=self.version,
            id=request.id,
            outputs=[
                Tensor(name, tensors[name].datatype, tensors[name].data)
                for name in names
                if name in tensors
            ],
            parameters=sequence_parameters(request) if self._is_ensemble else {},
            is_final=not self.is_decoupled,
        )


def sequence_parameters(request: InferRequest) -> dict[str, ParameterValue]:
    """The response parameters of every ensemble."""
    return {
        "sequence_id": request.sequence_id,
        "sequence_start": request.sequence_start,
        "sequence_end": request.sequence_end,
    }


def prefixed(prefix: str, error: RequestError) -> RequestError:
    """The same error with a prefix, as a composed model reports it."""
    text = f"{prefix}{error}"
    if isinstance(error, EngineDeadError):
        return EngineDeadError(text)
    return RequestError(text, error.kind)


def _inner(
    request: InferRequest, step: GraphStep, tensors: Mapping[str, Tensor]
) -> InferRequest:
    inputs = {
        name: Tensor(name, tensors[source].datatype, tensors[source].data)
        for name, source in step.input_map.items()
        if source in tensors
    }
    for tensor in step.model.config.input:
        if not tensor.optional and tensor.name not in inputs:
            raise RequestError(
                f"step '{step.model.name}' lacks its input '{tensor.name}', which no step wrote"
            )
    return InferRequest(
        model_name=step.model.name,
        id=request.id,
        inputs=inputs,
        parameters=request.parameters,
        priority=request.priority,
        timeout_us=request.timeout_us,
        sequence_id=request.sequence_id,
        sequence_start=request.sequence_start,
        sequence_end=request.sequence_end,
        arrival_ns=request.arrival_ns,
        handed_ns=time.monotonic_ns(),
        parent=request,
    )


def _ordered(model: RepositoryModel, steps: Sequence[GraphStep]) -> list[GraphStep]:
    known = {tensor.name for tensor in model.config.input}
    waiting, ordered = list(steps), []
    while waiting:
        step = next((s for s in waiting if known.issuperset(s.input_map.values())), None)
        if step is None:
            names = ", ".join(f"'{s.model.name}'" for s in waiting)
            raise ConfigError(
                f"{model.config_path}: the steps {names} wait for each other's outputs"
            )
        waiting.remove(step)
        ordered.append(step)
        known.update(step.output_map.values())
    return ordered
