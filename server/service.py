"""What the HTTP and gRPC servers share: models, counters, admission and settings."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelStatisticsResponse

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.config import FrontendConfig
from trimaran.server.fleet.first_frontend import FirstFrontend
from trimaran.server.fleet.other_frontends import OtherFrontends
from trimaran.server.inference.admission import Admission
from trimaran.server.inference.metadata import completed_config
from trimaran.server.inference.pieces import spread
from trimaran.server.inference.registry import (
    IndexEntry,
    ModelRegistry,
    NotReadyError,
    parse_version,
)
from trimaran.server.inference.request import InferRequest, InferResponse, Model
from trimaran.server.inference.validation import WireInput
from trimaran.server.loading.control import ModelControl
from trimaran.server.metrics.group_board import GroupBoard
from trimaran.server.metrics.measured_model import MeasuredModel
from trimaran.server.metrics.metrics import Metrics
from trimaran.server.protocol.infer_json import RequestedOutput
from trimaran.server.protocol.infer_response import select_outputs
from trimaran.server.protocol.load_request import LoadRequest
from trimaran.server.settings import Changes, LogSettings, TraceSettings

INTERNAL = "internal error; the server's log has the details"
"""What clients are told of a bug."""

CONTROL_REFUSED = "explicit model load / unload is not allowed if polling is enabled"
SHARED_MEMORY_DISABLED = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to "
    "enable."
)
REPOSITORY_NAME_REFUSED = "'repository_name' specification is not supported"


@dataclass(slots=True)
class Service:
    """One front end's state behind its protocols. Used on the event loop only."""

    config: FrontendConfig
    registry: ModelRegistry
    metrics: Metrics
    log_settings: LogSettings = field(default_factory=LogSettings)
    trace_settings: TraceSettings = field(default_factory=TraceSettings)
    admission: Admission = field(default_factory=Admission)
    board: GroupBoard = field(default_factory=GroupBoard)
    control: ModelControl | None = None
    """None where nothing is loaded while the server runs."""
    others: OtherFrontends | None = None
    """The front ends that follow this one; None if there can be none."""
    first: FirstFrontend | None = None
    """The front end that this one follows; None if this is the first."""
    _configs: WeakKeyDictionary[Model, ModelConfig] = field(default_factory=WeakKeyDictionary)

    @property
    def is_ready(self) -> bool:
        """Whether the server takes requests for all its models."""
        return not self.admission.is_draining and self.registry.is_ready

    def model_config(self, model: Model) -> ModelConfig:
        """The completed configuration of a model."""
        if model not in self._configs:
            self._configs[model] = completed_config(model)
        return self._configs[model]

    async def infer(
        self,
        model: Model,
        request: InferRequest,
        inputs: Sequence[WireInput],
        outputs: Sequence[RequestedOutput] = (),
    ) -> AsyncIterator[InferResponse]:
        """Check a parsed request against its model and start it.

        Raises:
            RequestError: the request does not fit; nothing was started.
        """
        names = tuple(output.name for output in outputs)
        check = self.registry.validator(model).check_in_pieces(inputs, names, request.id)
        request.inputs = await spread(check)
        request.outputs = names
        # Meanwhile the model may have been replaced, or unloaded.
        current = self.registry.get_ready(model.name, request.model_version)
        if current is not model and current.config != model.config:
            raise NotReadyError(model.name, model.version)
        return current.infer(request)

    async def infer_once(
        self,
        model: Model,
        request: InferRequest,
        inputs: Sequence[WireInput],
        outputs: Sequence[RequestedOutput],
    ) -> InferResponse:
        """Run a parsed request whose protocol has room for one response, and give that one:
        the first, under the request's id, with the outputs that were asked for.

        Raises:
            RequestError: the request does not fit or has failed.
        """
        only: InferResponse | None = None
        responses = await self.infer(model, request, inputs, outputs)
        async with aclosing(responses):  # type: ignore[type-var]
            async for response in responses:
                only = only or response
        if only is None:
            raise RequestError(
                f"model '{model.name}' ended without a response", ErrorKind.INTERNAL
            )
        only.id = request.id
        await self.select(model, only, outputs)
        return only

    async def select(
        self, model: Model, response: InferResponse, outputs: Sequence[RequestedOutput]
    ) -> None:
        """Leave a response with the outputs that were asked for, as they were asked for."""
        response.outputs = await select_outputs(
            response.outputs,
            outputs,
            self.registry.labels(model),
            is_batching=model.config.max_batch_size > 0,
        )

    async def refresh(self) -> None:
        """Bring what other front ends have counted up to date."""
        if self.others is not None:
            await self.others.refresh()

    async def statistics(self, name: str, version: str) -> ModelStatisticsResponse:
        """Counters of one model version, of all versions of one model, or of all models.

        Raises:
            RequestError: no such model or version.
        """
        if self.first is not None:
            return await self.first.statistics(name, version)
        await self.refresh()
        number = parse_version(version)
        models = [m for m in self.registry.models() if name in ("", m.name)]
        if not models and name:
            raise RequestError(f"requested model '{name}' is not available")
        if name and number is not None:
            models = [m for m in models if m.version == str(number)]
            if not models:
                raise RequestError(
                    f"requested model version is not available for model '{name}'"
                )
        response = ModelStatisticsResponse()
        for model in models:
            if model.is_ready and isinstance(model, MeasuredModel):
                message = model.statistics.message()
                self.metrics.others.add_statistics(message)
                response.model_stats.append(message)
        return response

    def own_counts(self) -> dict[str, Any]:
        """What this front end alone has counted."""
        models = (m for m in self.registry.models() if isinstance(m, MeasuredModel))
        statistics = [model.statistics.message() for model in models]
        return self.metrics.own_counts(statistics, self.admission.num_running)

    async def change_log_settings(self, changes: dict[str, Any]) -> None:
        """Change some log settings, of all front ends.

        Raises:
            RequestError: as for `LogSettings.update`.
        """
        if self.first is not None:
            await self.first.change_log_settings(changes)
            return
        self.log_settings.update(changes)
        if self.others is not None:
            self.others.publish()
            await self.others.heard()

    async def change_trace_settings(self, model: str, changes: Changes) -> None:
        """Change some trace settings of a model, or of all, at all front ends.

        Raises:
            RequestError: as for `TraceSettings.update`.
        """
        if self.first is not None:
            await self.first.change_trace_settings(model, changes)
            return
        self.trace_settings.update(model, changes)
        if self.others is not None:
            self.others.publish()
            await self.others.heard()

    def check_traced(self, model: str) -> None:
        """Raise a RequestError if trace settings are those of a model that does not exist."""
        if model and all(m.name != model for m in self.registry.models()):
            raise RequestError(f"Request for unknown model : {model}")

    async def index(self, only_ready: bool) -> list[IndexEntry]:
        """The repository index: in explicit mode with what could be loaded.

        Raises:
            RequestError: the repository cannot be read.
        """
        if self.first is not None:
            return await self.first.index(only_ready)
        others: list[str] = []
        is_explicit = self.config.model_control_mode == "explicit"
        if is_explicit and not only_ready and self.control is not None:
            others = self.control.names()
        return self.registry.index(only_ready=only_ready, others=others)

    async def load(self, request: LoadRequest) -> None:
        """Load a model on a client's request; returns once it serves.

        Raises:
            RequestError: it was not loaded.
        """
        if self.first is not None:
            await self.first.load(request)
            return
        started_s = time.monotonic()
        await self._control().load(request)
        if self.others is not None:
            await self.others.served(request.name, time.monotonic() - started_s)

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Begin to unload a model on a client's request.

        Raises:
            RequestError: clients may not.
        """
        if self.first is not None:
            await self.first.unload(name, unload_dependents=unload_dependents)
            return
        self._control().unload(name, unload_dependents=unload_dependents)
        if self.others is not None:
            await self.others.heard()

    def _control(self) -> ModelControl:
        if self.config.model_control_mode != "explicit" or self.control is None:
            raise RequestError(CONTROL_REFUSED, ErrorKind.UNAVAILABLE)
        self.admission.check()
        return self.control


def unknown_region(kind: str, name: str) -> RequestError:
    """The error of a shared-memory region that nobody registered."""
    return RequestError(
        f"Unable to find {kind} shared memory region: '{name}'", ErrorKind.NOT_FOUND
    )
