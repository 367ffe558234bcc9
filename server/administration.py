"""The first front end's administration: loads models and changes settings for all."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc.service_pb2 import ModelStatisticsResponse

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.config import FrontendConfig
from trimaran.server.fleet.administration import NoPeers, Peers
from trimaran.server.inference.admission import Admission
from trimaran.server.inference.registry import IndexEntry, ModelRegistry, parse_version
from trimaran.server.loading.control import ModelControl
from trimaran.server.metrics.measured_model import MeasuredModel
from trimaran.server.metrics.metrics import Metrics
from trimaran.server.protocol.limits import check_id
from trimaran.server.protocol.load_request import LoadRequest
from trimaran.server.settings import Changes, LogSettings, TraceSettings
from trimaran.server.shared_memory.region_specs import Kind, RegionSpec
from trimaran.server.shared_memory.regions import SharedRegions

CONTROL_REFUSED = "explicit model load / unload is not allowed if polling is enabled"


@dataclass(frozen=True, slots=True)
class ChangeableState:
    """What clients change while the server runs, besides its models."""

    log_settings: LogSettings
    trace_settings: TraceSettings
    regions: SharedRegions


class OwnAdministration:
    """`Administration` in this process. Used on the event loop only."""

    def __init__(
        self,
        config: FrontendConfig,
        registry: ModelRegistry,
        metrics: Metrics,
        admission: Admission,
        state: ChangeableState,
        *,
        control: ModelControl | None = None,
        peers: Peers | None = None,
    ) -> None:
        """``control`` is None where models cannot be loaded while the server runs."""
        self._config = config
        self._registry = registry
        self._metrics = metrics
        self._admission = admission
        self._log_settings = state.log_settings
        self._trace_settings = state.trace_settings
        self._control = control
        self._peers: Peers = peers if peers is not None else NoPeers()
        self._regions = state.regions

    async def refresh(self) -> None:
        """See `Administration`."""
        await self._peers.refresh()

    async def statistics(self, name: str, version: str) -> ModelStatisticsResponse:
        """See `Administration`."""
        await self.refresh()
        number = parse_version(version)
        models = [m for m in self._registry.models() if name in ("", m.name)]
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
                self._metrics.others.add_statistics(message)
                response.model_stats.append(message)
        return response

    async def change_log_settings(self, changes: dict[str, Any]) -> None:
        """See `Administration`."""
        self._log_settings.update(changes)
        self._peers.publish()
        await self._peers.await_update()

    async def change_trace_settings(self, model: str, changes: Changes) -> None:
        """See `Administration`."""
        self._trace_settings.update(model, changes)
        self._peers.publish()
        await self._peers.await_update()

    async def register_region(self, spec: RegionSpec) -> None:
        """See `Administration`."""
        check_id("the region's name", spec.name)
        await self._regions.register(spec)
        self._peers.publish()
        await self._peers.await_update()

    async def unregister_region(self, kind: Kind, name: str) -> None:
        """See `Administration`."""
        self._regions.unregister(kind, name)
        self._peers.publish()
        await self._peers.await_update()

    async def index(self, only_ready: bool) -> list[IndexEntry]:
        """See `Administration`."""
        others: list[str] = []
        is_explicit = self._config.model_control_mode == "explicit"
        if is_explicit and not only_ready and self._control is not None:
            others = self._control.names()
        return self._registry.index(only_ready=only_ready, others=others)

    async def load(self, request: LoadRequest) -> None:
        """See `Administration`."""
        started_s = time.monotonic()
        await self._model_control().load(request)
        await self._peers.served(request.name, time.monotonic() - started_s)

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """See `Administration`."""
        self._model_control().unload(name, unload_dependents=unload_dependents)
        await self._peers.await_update()

    def _model_control(self) -> ModelControl:
        if self._config.model_control_mode != "explicit" or self._control is None:
            raise RequestError(CONTROL_REFUSED, ErrorKind.UNAVAILABLE)
        self._admission.check()
        return self._control
