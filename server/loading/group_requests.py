"""Requests to the supervisor: worker groups started and stopped, state for a successor."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages.supervisor_link import SupervisorLink
from trimaran.server.inference.registry import StateOfVersion
from trimaran.server.repository.model_repository import RepositoryModel

_REPLY_TIMEOUT_S = 120.0
"""Longest time to start processes, or to see all of them end."""


class GroupsRefusedError(RequestError):
    """The supervisor refused to start these groups; no process was started."""

    def __init__(self, text: str, conflicts: Sequence[str]) -> None:
        super().__init__(text, ErrorKind.INTERNAL)
        self.conflicts = frozenset(conflicts)
        """Running groups that hold the needed devices; empty if ending them would not help."""


class GroupRequests:
    """Requests over the supervisor's link. Used on the event loop only."""

    def __init__(self, link: SupervisorLink) -> None:
        self._link = link
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Mapping[str, Any]]] = {}

    async def start(self, model: RepositoryModel, generation: int) -> tuple[str, ...]:
        """Request the start of a model's worker groups; returns their names before they are
        ready.

        Raises:
            GroupsRefusedError: the model cannot be served, or other groups hold the devices.
        """
        reply = await self._ask(
            "start_groups",
            model=model.name,
            config=model.config.SerializeToString(),
            folder=str(model.folder),
            generation=generation,
        )
        conflicts = reply.get("conflicts", ())
        if reply.get("error") or conflicts:
            raise GroupsRefusedError(str(reply.get("error", "")), conflicts)
        return tuple(reply["groups"])

    async def stop(self, groups: Sequence[str]) -> None:
        """End these groups; returns once all of their processes have ended.

        Raises:
            RequestError: some did not end.
        """
        reply = await self._ask("stop_groups", groups=list(groups))
        if reply.get("error"):
            raise RequestError(str(reply["error"]), ErrorKind.INTERNAL)

    def save_state(self, groups: Sequence[str], state: bytes) -> None:
        """Save ``state`` for the next front end, which finds exactly these groups."""
        arguments = {"groups": list(groups), "state": state}
        self._link.request(next(self._ids), "save_state", arguments)

    def on_reply(self, arguments: Mapping[str, Any]) -> None:
        """Take the supervisor's answer."""
        future = self._waiting.pop(int(arguments["request_id"]), None)
        if future is not None and not future.done():
            future.set_result(arguments)

    async def _ask(self, verb: str, **arguments: Any) -> Mapping[str, Any]:
        request_id = next(self._ids)
        future: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        self._link.request(request_id, verb, arguments)
        try:
            # Not `wait_for`: before Python 3.12 a cancellation is lost if the answer has
            # arrived.
            answered, _ = await asyncio.wait((future,), timeout=_REPLY_TIMEOUT_S)
        finally:
            self._waiting.pop(request_id, None)
        if not answered:
            raise RequestError(
                f"the supervisor did not answer {verb} within {_REPLY_TIMEOUT_S:g} s",
                ErrorKind.INTERNAL,
            )
        return future.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """One loaded model, or a model that waits for its steps."""

    name: str
    folder: str
    config: bytes
    """The ModelConfig that the model was loaded with, serialized."""

    version: str = "1"
    fingerprint: str = ""
    groups: tuple[str, ...] = ()
    generation: int = 1
    is_loaded: bool = True
    load_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeavingGroups:
    """One generation of a model that is no longer served. Its groups end once no front end has
    requests there.
    """

    model: str
    version: str
    generation: int
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The loaded models, the states of other models, and the last generation of every model."""

    models: tuple[SavedModel, ...] = ()
    leaving: tuple[LeavingGroups, ...] = ()
    generations: dict[str, int] = field(default_factory=dict)
    states: tuple[StateOfVersion, ...] = ()
    """Every version that is not ready."""

    def to_bytes(self) -> bytes:
        """The bytes that the supervisor keeps."""
        states = [each.to_wire() for each in self.states]
        packed: bytes = msgpack.packb({**asdict(self), "states": states})
        return packed

    @classmethod
    def from_bytes(cls, raw: bytes) -> SavedState:
        """The inverse of `to_bytes`."""
        values: dict[str, Any] = msgpack.unpackb(raw)
        models: Sequence[dict[str, Any]] = values["models"]
        leaving: Sequence[dict[str, Any]] = values["leaving"]
        return cls(
            models=tuple(
                SavedModel(**{**model, "groups": tuple(model["groups"])}) for model in models
            ),
            leaving=tuple(
                LeavingGroups(**{**each, "groups": tuple(each["groups"])}) for each in leaving
            ),
            generations=dict(values["generations"]),
            states=tuple(map(StateOfVersion.from_wire, values["states"])),
        )
