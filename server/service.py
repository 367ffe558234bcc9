"""The state that the HTTP and gRPC servers share: models, counters, admission, settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelStatisticsResponse

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.administration import CONTROL_REFUSED, ChangeableState, OwnAdministration
from trimaran.server.config import FrontendConfig
from trimaran.server.direct.direct_text import DirectText
from trimaran.server.direct.plain_request import PlainRequest
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
from trimaran.server.inference.tensor_bytes import to_parts
from trimaran.server.inference.validation import WireInput
from trimaran.server.loading.control import ModelControl
from trimaran.server.metrics.group_board import GroupBoard
from trimaran.server.metrics.measured_model import MeasuredModel
from trimaran.server.metrics.metrics import Metrics
from trimaran.server.protocol.infer_json import ParsedInfer, RequestedOutput
from trimaran.server.protocol.infer_response import select_outputs
from trimaran.server.protocol.load_request import LoadRequest
from trimaran.server.settings import Changes, LogSettings, TraceSettings
from trimaran.server.shared_memory.region_specs import Kind, RegionSpec
from trimaran.server.shared_memory.regions import SharedRegions

INTERNAL = "internal error; the server's log has the details"
"""The text that clients get for an internal error."""

_SLICES_AT_ONCE = 16
"""Slices of clients' memory that are found, or read if they are short, before other requests
run: at most a megabyte."""


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
    regions: SharedRegions = field(init=False)
    _configs: WeakKeyDictionary[Model, ModelConfig] = field(default_factory=WeakKeyDictionary)
    _direct: WeakKeyDictionary[Model, DirectText | None] = field(
        default_factory=WeakKeyDictionary
    )

    _administration: Administration = field(init=False)

    def __post_init__(self) -> None:
        self.regions = SharedRegions(is_allowed=self.config.allow_client_shm)
        self._administration = OwnAdministration(
            self.config, self.registry, self.metrics, self.admission, self._state()
        )

    def administer(self, control: ModelControl, peers: Peers) -> None:
        """Load models with ``control`` and tell ``peers``: this is the first front end."""
        self._administration = OwnAdministration(
            self.config, self.registry, self.metrics, self.admission, self._state(),
            control=control, peers=peers,
        )  # fmt: skip

    def _state(self) -> ChangeableState:
        return ChangeableState(self.log_settings, self.trace_settings, self.regions)

    def follow(
        self, first: Administration, trace_settings: TraceSettings, regions: SharedRegions
    ) -> None:
        """Forward administration to ``first``, and show the trace settings and the regions that
        it sends.
        """
        self._administration = first
        self.trace_settings = trace_settings
        self.regions = regions

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
        model = await self._checked(model, request, inputs, outputs)
        direct = self.direct(model)
        if direct is not None:
            plain = direct.reader.of_tensors(request, is_streaming=True)
            if plain is not None:
                return direct.stream(model, plain)
        return model.infer(request)

    async def _checked(
        self,
        model: Model,
        request: InferRequest,
        inputs: Sequence[WireInput],
        outputs: Sequence[RequestedOutput],
    ) -> Model:
        """The model that takes a request, whose inputs are checked and set.

        Raises:
            RequestError: the request does not fit the model.
        """
        names = tuple(output.name for output in outputs)
        check = self.registry.validator(model).check_in_chunks(inputs, names, request.id)
        request.inputs = await run_cooperatively(check)
        request.outputs = names
        # The model may have been replaced or unloaded during the check.
        current = self.registry.get_ready(model.name, request.model_version)
        if current is not model and current.config != model.config:
            raise NotReadyError(model.name, model.version)
        return current

    async def find_slices(self, parsed: ParsedInfer, max_bytes: int) -> None:
        """Read the inputs in the client's memory, and find the slices of its outputs.

        Raises:
            RequestError: a region or a slice does not exist, or the inputs have more than
                ``max_bytes`` together.
        """
        if not parsed.has_slices:
            return
        found = []
        for number, wire in enumerate(parsed.inputs, 1):
            await _let_others_run(number)
            if wire.region_slice is not None:
                found.append((wire, await self.regions.find(wire.region_slice)))
        for number, output in enumerate(parsed.outputs, 1):
            await _let_others_run(number)
            if output.region_slice is not None:
                parsed.targets[output.name] = await self.regions.find(output.region_slice)
        num_bytes = sum(part.num_bytes for _, part in found)
        if num_bytes > max_bytes:
            raise RequestError(
                f"the inputs in shared memory have {num_bytes} bytes together, and a request "
                f"has at most {max_bytes}. Use --http-max-input-size (over gRPC: "
                "--grpc-max-message-size) to increase the limit."
            )
        for number, (wire, part) in enumerate(found, 1):
            await _let_others_run(number)
            wire.data = await part.read()

    def plain(
        self, model: Model, parsed: ParsedInfer, values: Mapping[str, Any]
    ) -> PlainRequest | None:
        """The plain request of inputs that hold one value each; None if the request is not
        plain, or is wrong. ``parsed`` has no inputs.
        """
        direct = self.direct(model)
        if direct is None or any(o.name != direct.reader.output for o in parsed.outputs):
            return None
        return direct.reader.of_values(parsed.request, values)

    async def infer_once(
        self, model: Model, parsed: ParsedInfer, plain: PlainRequest | None = None
    ) -> InferResponse:
        """Run a parsed request over a protocol with room for one response. Returns the first
        response, under the request's id, with the requested outputs. ``plain`` is what `plain`
        has found.

        Raises:
            RequestError: the request does not fit or has failed.
        """
        request = parsed.request
        if plain is None:
            model = await self._checked(model, request, parsed.inputs, parsed.outputs)
        direct = self.direct(model)
        if plain is None and direct is not None:
            plain = direct.reader.of_tensors(request)
        if direct is not None and plain is not None:
            only: InferResponse | None = await direct.respond(model, plain)
        else:
            only = await self._only(model, request)
        if only is None:
            raise RequestError(
                f"model '{model.name}' ended without a response", ErrorKind.INTERNAL
            )
        only.id = request.id
        await self.select(model, only, parsed)
        return only

    @staticmethod
    async def _only(model: Model, request: InferRequest) -> InferResponse | None:
        """The first response of a model; None if there is none."""
        only: InferResponse | None = None
        responses = model.infer(request)
        async with aclosing(responses):  # type: ignore[type-var]
            async for response in responses:
                only = only or response
        return only

    async def select(self, model: Model, response: InferResponse, parsed: ParsedInfer) -> None:
        """Reduce a response to the requested outputs, in the requested order, and write those
        that clients want in their memory.

        Raises:
            RequestError: an output does not fit its slice.
        """
        response.outputs = await select_outputs(
            response.outputs,
            parsed.outputs,
            self.registry.labels(model),
            is_batching=model.config.max_batch_size > 0,
        )
        for tensor in response.outputs:
            target = parsed.targets.get(tensor.name)
            if target is not None:
                parts = await run_cooperatively(to_parts(tensor.data, tensor.datatype))
                await target.write(tensor.name, parts)

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

    def check_control(self) -> None:
        """Whether clients can load models at all, before a long request is decoded.

        Raises:
            RequestError: they cannot.
        """
        if self.config.model_control_mode != "explicit":
            raise RequestError(CONTROL_REFUSED, ErrorKind.UNAVAILABLE)

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

    async def register_region(self, spec: RegionSpec) -> None:
        """See `Administration.register_region`."""
        await self._administration.register_region(spec)

    async def unregister_region(self, kind: Kind, name: str) -> None:
        """See `Administration.unregister_region`."""
        await self._administration.unregister_region(kind, name)


async def _let_others_run(number: int) -> None:
    """Let other requests run after each `_SLICES_AT_ONCE` slices of a request."""
    if number % _SLICES_AT_ONCE == 0:
        await asyncio.sleep(0)
