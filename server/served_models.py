"""The source of a front end's models: its own configuration, or the first front end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from trimaran.comm.messages.supervisor_link import SupervisorLink
from trimaran.comm.transport.sockets import Address
from trimaran.server.config import FrontendConfig
from trimaran.server.engines.client import EngineClient
from trimaran.server.fleet.first_frontend import FirstFrontend
from trimaran.server.fleet.model_mirror import ModelMirror
from trimaran.server.fleet.other_frontends import OtherFrontends
from trimaran.server.fleet.peer_link import SharedState
from trimaran.server.inference.registry import ModelRegistry
from trimaran.server.loading.control import ModelControl
from trimaran.server.loading.group_requests import GroupRequests
from trimaran.server.loading.reader import ModelReader
from trimaran.server.loading.startup import ModelStartup, RepositoryPoll
from trimaran.server.loading.token_groups import TokenGroups
from trimaran.server.metrics.group_board import GroupBoard
from trimaran.server.metrics.metrics import Metrics
from trimaran.server.models.factory import FactoryOptions, ModelFactory
from trimaran.server.protocol.load_request import OverrideFolders
from trimaran.server.python_models.calls import ModelCalls
from trimaran.server.repository.model_repository import PythonModels
from trimaran.server.service import Service
from trimaran.server.settings import LogSettings, TraceSettings
from trimaran.server.shared_memory.regions import SharedRegions


class ServedModels(Protocol):
    """Fills the registry of one front end and keeps it up to date."""

    async def begin(self) -> None:
        """Register the models that are known before any engine has dialled in.

        Raises:
            ConfigError: a model cannot be served.
        """

    async def finish(self) -> None:
        """Return once the first models serve.

        Raises:
            ConfigError: a model cannot be served.
        """

    async def attach(self, service: Service) -> None:
        """Let a service request changes."""

    async def follow(self) -> None:
        """Follow changes of the repository or of the first front end, until cancelled."""

    async def give_up(self) -> None:
        """Cancel the loads under way. Idempotent."""

    async def close(self) -> None:
        """Release all models."""

    def on_reply(self, arguments: Mapping[str, Any]) -> None:
        """Dispatch an answer of the supervisor."""


class OwnModels:
    """The models of the first front end, which loads them."""

    def __init__(
        self,
        config: FrontendConfig,
        link: SupervisorLink,
        engines: EngineClient,
        board: GroupBoard,
        metrics: Metrics,
        registry: ModelRegistry,
    ) -> None:
        self._config = config
        self._calls = ModelCalls(registry, metrics.custom)
        self._requests = GroupRequests(link)
        self._others = OtherFrontends(config, registry, board, metrics.others)
        overrides = OverrideFolders(_scratch(config))
        python = PythonModels.parse(config.python_models)
        reader = ModelReader(Path(config.model_repository), overrides, python)
        groups = TokenGroups(self._requests, engines, board, self._others.released)
        self._control = ModelControl(
            reader,
            overrides,
            groups,
            ModelFactory(self._calls, FactoryOptions.of(config)),
            metrics,
            registry,
            self._save_state,
        )
        self._startup = ModelStartup(config, reader, self._control, groups)
        self._poll = RepositoryPoll(reader, self._control, config.repository_poll_s)

    async def begin(self) -> None:
        """See `ServedModels`."""
        await self._startup.begin()

    async def finish(self) -> None:
        """See `ServedModels`."""
        await self._startup.finish()

    async def attach(self, service: Service) -> None:
        """See `ServedModels`."""
        service.administer(self._control, self._others)
        self._calls.loader = service
        await self._others.start(service)

    async def follow(self) -> None:
        """See `ServedModels`."""
        if self._config.model_control_mode == "poll":
            await self._poll.run()
        else:
            await asyncio.Event().wait()

    async def give_up(self) -> None:
        """See `ServedModels`."""
        await self._control.close()

    async def close(self) -> None:
        """See `ServedModels`."""
        await self._control.close()
        await self._control.end_models()
        self._others.close()

    def on_reply(self, arguments: Mapping[str, Any]) -> None:
        """See `ServedModels`."""
        self._requests.on_reply(arguments)

    def _save_state(self, groups: Sequence[str], state: bytes) -> None:
        self._requests.save_state(groups, state)
        self._others.save_state(state)


class FollowedModels:
    """The models of any other front end: those of the first front end."""

    def __init__(
        self,
        config: FrontendConfig,
        link: SupervisorLink,
        engines: EngineClient,
        board: GroupBoard,
        metrics: Metrics,
        registry: ModelRegistry,
        log_settings: LogSettings,
    ) -> None:
        groups = TokenGroups(GroupRequests(link), engines, board)
        self._calls = ModelCalls(registry, metrics.custom)
        factory = ModelFactory(self._calls, FactoryOptions.of(config))
        python = PythonModels.parse(config.python_models)
        self._mirror = ModelMirror(
            factory, python, engines, groups, metrics, registry, log_settings
        )
        self._service: Service | None = None
        self._trace_settings = TraceSettings()
        self._regions = SharedRegions(is_allowed=config.allow_client_shm)
        self._first = FirstFrontend(
            config,
            self._note,
            self._mirror.apply,
            self._mirror.settled,
            self._mirror.released,
            self._own_counts,
        )
        self._connection: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """See `ServedModels`."""
        self._connection = asyncio.ensure_future(self._first.run())

    async def finish(self) -> None:
        """See `ServedModels`."""
        await self._first.told()

    async def attach(self, service: Service) -> None:
        """See `ServedModels`."""
        service.follow(self._first, self._trace_settings, self._regions)
        self._calls.loader = service
        self._service = service

    async def follow(self) -> None:
        """See `ServedModels`."""
        assert self._connection is not None
        await asyncio.shield(self._connection)

    async def give_up(self) -> None:
        """See `ServedModels`."""
        self._first.expects_the_end = True

    async def close(self) -> None:
        """See `ServedModels`."""
        if self._connection is not None:
            self._connection.cancel()
            with suppress(asyncio.CancelledError):
                await self._connection
        await self._mirror.close()

    def on_reply(self, arguments: Mapping[str, Any]) -> None:
        """See `ServedModels`."""

    def _note(self, state: SharedState) -> None:
        self._trace_settings.changed = {n: dict(v) for n, v in state.trace_settings.items()}
        self._regions.follow(state.regions)
        self._mirror.note(state)

    def _own_counts(self) -> Mapping[str, Any]:
        if self._service is None:
            return {"samples": [], "statistics": [], "num_running": 0}
        return self._service.own_counts()


def _scratch(config: FrontendConfig) -> Path:
    """A folder for clients' files, inside a folder that the supervisor deletes at the end."""
    address = Address.parse(config.engine_listen[0])
    return Path(address.path).parent / "models"
