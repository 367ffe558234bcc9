"""The front end's requests: start groups for a loaded model, stop groups of an unloaded
model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.message import DecodeError
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ConfigError
from trimaran.comm.messages.messages import ChildRequest, Command
from trimaran.launcher.config import GroupConfig
from trimaran.launcher.placement.preflight import check_host_memory
from trimaran.launcher.supervisor.child_connections import ChildConnection
from trimaran.launcher.supervisor.group import Group, GroupState
from trimaran.launcher.supervisor.group_table import GroupTable
from trimaran.server.repository.model_repository import RepositoryModel, repository_model

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0
"""Time after which a group that was commanded to end is killed."""


class GroupResolver(Protocol):
    """Turns a model into the groups that serve it (`resolve.Resolver`)."""

    def groups_of(
        self, model: RepositoryModel, generation: int, running: Sequence[GroupConfig]
    ) -> tuple[GroupConfig, ...]:
        """The groups of a model beside the running ones.

        Raises:
            ConfigError: the model cannot be served; with ``groups`` if these groups hold the
            needed devices.
        """


class GroupControl:
    """Starts and stops worker groups while the server runs."""

    def __init__(self, table: GroupTable, resolver: GroupResolver | None) -> None:
        self._table = table
        self._resolver = resolver
        self._loading: set[Group] = set()
        self._stopping: list[tuple[ChildConnection, int, list[Group]]] = []

    def handle(self, connection: ChildConnection, request: ChildRequest) -> None:
        """Answer one request, immediately or on completion."""
        arguments = request.arguments
        try:
            if request.verb == "start_groups":
                self._reply(connection, request.request_id, **self._start(arguments))
            elif request.verb == "stop_groups":
                self._stop(connection, request.request_id, list(arguments["groups"]))
            elif request.verb == "save_state":
                self._table.saved_frontend.update(
                    state=arguments["state"], groups=list(arguments["groups"])
                )
                self._reply(connection, request.request_id)
            else:
                raise ConfigError(f"unknown request {request.verb!r}")
        except (ConfigError, OSError) as error:
            conflicts = list(getattr(error, "groups", ()))
            self._reply(connection, request.request_id, error=str(error), conflicts=conflicts)

    def fail_load(self, group: Group) -> bool:
        """Whether a failed group was being loaded: then the load has failed, not the server."""
        if group not in self._loading:
            return False
        self._loading.discard(group)
        if group is self._table.orchestrator:
            # The next load starts another orchestrator.
            self._table.remove(group)
            self._table.spawn_client.give_up(f"its orchestrator did not start: {group.fault}")
            return True
        self._table.mark_failed(group)
        self._table.tell(group)
        self._table.remove(group)
        return True

    def on_ready(self, group: Group) -> None:
        """A group is ready: complete its load, if any."""
        self._loading.discard(group)

    def on_stopped(self, group: Group) -> None:
        """A group has ended as commanded: remove the group if it was being unloaded."""
        for entry in list(self._stopping):
            connection, request_id, groups = entry
            if group not in groups:
                continue
            groups.remove(group)
            if group in self._table.workers.values():
                self._table.remove(group)
                logger.info("%s: ended", group.spec.title)
            if not groups:
                self._stopping.remove(entry)
                self._reply(connection, request_id)

    def is_stopping(self, group: Group) -> bool:
        """Whether a group was commanded to end while the server goes on."""
        return any(group in groups for _, _, groups in self._stopping)

    def on_new_frontend(self, connection: ChildConnection) -> None:
        """End the groups that a dead front end had started and not used yet."""
        used = self._table.saved_frontend["groups"]
        if used is not None:
            unused = [name for name in self._table.configs if name not in used]
            if unused:
                self._stop(connection, -1, unused)

    # ---- parts --------------------------------------------------------------------------

    def _start(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if self._resolver is None:
            raise ConfigError("this server starts no groups while it runs")
        try:
            config = ModelConfig.FromString(arguments["config"])
        except DecodeError as error:
            raise ConfigError(f"a broken model configuration: {error}") from None
        model = repository_model(Path(arguments["folder"]), config)
        running = list(self._table.configs.values())
        configs = self._resolver.groups_of(model, int(arguments["generation"]), running)
        started = [config.name for config in configs if config.name in self._table.configs]
        if started:
            raise ConfigError(
                f"group '{started[0]}' runs already: stop it first, or start another generation"
            )
        if any(config.launch == "prestarted" for config in configs):
            raise ConfigError(
                f"model '{model.name}' needs ranks of its own, but all ranks of this server "
                "were started before it (--disable-spawn-processes). Start it without that."
            )
        check_host_memory(configs)
        for group in self._table.add(configs):
            self._loading.add(group)
            group.start()
            # A group that could not be started has already been forgotten.
            if group.state is not GroupState.DOWN:
                self._table.tell(group)
        return {"groups": [config.name for config in configs]}

    def _stop(self, connection: ChildConnection, request_id: int, names: list[str]) -> None:
        groups = []
        for name in names:
            group = self._table.holding(name)
            if group is None:
                continue
            if len(group.spec.engines) > 1:
                raise ConfigError(
                    f"group '{name}' shares its MPI job with others and cannot end alone"
                )
            groups.append(group)
        self._stopping.append((connection, request_id, list(groups)))
        for group in groups:
            self._loading.discard(group)
            if group.state is GroupState.DOWN:
                asyncio.get_running_loop().call_soon(self.on_stopped, group)
            else:
                group.stop()
                asyncio.get_running_loop().call_later(_STOP_GRACE_S, _kill_slow, group)
        if not groups:
            self._stopping.pop()
            self._reply(connection, request_id)

    def _reply(
        self, connection: ChildConnection, request_id: int, error: str = "", **values: Any
    ) -> None:
        if request_id < 0:
            return
        arguments = {"groups": [], "conflicts": [], **values}
        arguments.update(request_id=request_id, error=error)
        connection.send(Command(verb="reply", arguments=arguments))


def _kill_slow(group: Group) -> None:
    if group.state is GroupState.STOPPING:
        logger.warning("killing what has not ended: %s", group.spec.title)
        group.kill()
