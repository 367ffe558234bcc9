"""The state that the HTTP and gRPC servers share: models, counters, admission, settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelStatisticsResponse

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.administration import OwnAdministration
from trimaran.server.config import FrontendConfig
from trimaran.server.direct.direct_text import DirectText
from trimaran.server.fleet.administration import Administration, Peers
from trimaran.server.inference.admission import Admission
from trimaran.server.inference.cooperative import run_cooperatively
from trimaran.server.inference.metadata import completed_config
from trimaran.server.inference.registry import (
    IndexEntry,
    ModelRegistry,
    NotReadyError,
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
"""The text that clients get for an internal error."""

SHARED_MEMORY_DISABLED = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to "
    "enable."
)


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
    _configs: WeakKeyDictionary[Model, ModelConfig] = field(default_factory=WeakKeyDictionary)
    _direct: WeakKeyDictionary[Model, DirectText | None] = field(
        default_factory=WeakKeyDictionary
    )

    _administration: Administration = field(init=False)

    def __post_init__(self) -> None:
        self._administration = OwnAdministration(
            self.config, self.registry, self.metrics, self.admission, self.log_settings,
            self.trace_settings,
        )  # fmt: skip

    def administer(self, control: ModelControl, peers: Peers) -> None:
        """Load models with ``control`` and tell ``peers``: this is the first front end."""
        self._administration = OwnAdministration(
            self.config, self.registry, self.metrics, self.admission, self.log_settings,
            self.trace_settings, control=control, peers=peers,
        )  # fmt: skip

    def follow(self, first: Administration, trace_settings: TraceSettings) -> None:
        """Forward administration to ``first``, and show the trace settings that it sends."""
        self._administration = first
        self.trace_settings = trace_settings

    @property
    def is_ready(self) -> bool:
        """Whether the server takes requests for all its models."""
        return not self.admission.is_draining and self.registry.is_ready

    def model_config(self, model: Model) -> ModelConfig:
        """The completed configuration of a model."""
        if model not in self._configs:
            self._configs[model] = completed_config(model)
        return self._configs[model]

    def direct(self, model: Model) -> DirectText | None:
        """The short way of a model's plain requests; None if the model has none."""
        try:
            return self._direct[model]
        except KeyError:
            found = self._direct[model] = DirectText.of(model)
            return found

    async def infer(
        self,
        model: Model,
        request: InferRequest,
        inputs: Sequence[WireInput],
        outputs: Sequence[RequestedOutput] = (),
    ) -> AsyncIterator[InferResponse]:
        """Check a parsed request against its model and start it.

        Raises:
            RequestError: the request does not fit the model; it was not started.
        """
        names = tuple(output.name for output in outputs)
        check = self.registry.validator(model).check_in_chunks(inputs, names, request.id)
        request.inputs = await run_cooperatively(check)
        request.outputs = names
        # The model may have been replaced or unloaded during the check.
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
        """Run a parsed request over a protocol with room for one response. Returns the first
        response, under the request's id, with the requested outputs.

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
        """Reduce a response to the requested outputs, in the requested order."""
        response.outputs = await select_outputs(
            response.outputs,
            outputs,
            self.registry.labels(model),
            is_batching=model.config.max_batch_size > 0,
        )

    def own_counts(self) -> dict[str, Any]:
        """The counts of this front end alone."""
        models = (m for m in self.registry.models() if isinstance(m, MeasuredModel))
        statistics = [model.statistics.message() for model in models]
        return self.metrics.own_counts(statistics, self.admission.num_running)

    def check_traced(self, model: str) -> None:
        """Raise a RequestError if trace settings name a model that does not exist."""
        if model and all(m.name != model for m in self.registry.models()):
            raise RequestError(f"Request for unknown model : {model}")

    # ---- administration, by this front end or by the first ---------------------------------

    async def refresh(self) -> None:
        """See `Administration.refresh`."""
        await self._administration.refresh()

    async def statistics(self, name: str, version: str) -> ModelStatisticsResponse:
        """See `Administration.statistics`."""
        return await self._administration.statistics(name, version)

    async def index(self, only_ready: bool) -> list[IndexEntry]:
        """See `Administration.index`."""
        return await self._administration.index(only_ready)

    async def load(self, request: LoadRequest) -> None:
        """See `Administration.load`."""
        await self._administration.load(request)

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """See `Administration.unload`."""
        await self._administration.unload(name, unload_dependents=unload_dependents)

    async def change_log_settings(self, changes: dict[str, Any]) -> None:
        """See `Administration.change_log_settings`."""
        await self._administration.change_log_settings(changes)

    async def change_trace_settings(self, model: str, changes: Changes) -> None:
        """See `Administration.change_trace_settings`."""
        await self._administration.change_trace_settings(model, changes)


def unknown_region(kind: str, name: str) -> RequestError:
    """The error of a shared-memory region that was never registered."""
    return RequestError(
        f"Unable to find {kind} shared memory region: '{name}'", ErrorKind.NOT_FOUND
    )
