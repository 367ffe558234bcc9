"""What the front end asks of the supervisor: worker groups started, stopped and remembered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages.supervisor_link import SupervisorLink
from trimaran.server.repository.model_repository import RepositoryModel

_REPLY_TIMEOUT_S = 120.0
"""Longest time to start processes, or to see them all gone."""


class GroupsRefusedError(RequestError):
    """The supervisor does not start these groups; nothing was started."""

    def __init__(self, text: str, conflicts: Sequence[str]) -> None:
        super().__init__(text, ErrorKind.INTERNAL)
        self.conflicts = frozenset(conflicts)
        """Running groups whose place is needed; empty if their end would not help."""


class GroupRequests:
    """Requests over the supervisor's link. Used on the event loop only."""

    def __init__(self, link: SupervisorLink) -> None:
        self._link = link
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Mapping[str, Any]]] = {}

    async def start(self, model: RepositoryModel, generation: int) -> tuple[str, ...]:
        """Start the worker groups of a model; their names. They are not ready yet.

        Raises:
            GroupsRefusedError: the model cannot be served, or other groups are in the way.
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
        """End these groups; returns once all of their processes are gone.

        Raises:
            RequestError: some did not end.
        """
        reply = await self._ask("stop_groups", groups=list(groups))
        if reply.get("error"):
            raise RequestError(str(reply["error"]), ErrorKind.INTERNAL)

    def remember(self, groups: Sequence[str], state: bytes) -> None:
        """Leave ``state`` to the next front end; it finds these groups and no others."""
        arguments = {"groups": list(groups), "state": state}
        self._link.request(next(self._ids), "remember", arguments)

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
            # Not `wait_for`, which before Python 3.12 forgets that it was cancelled if the
            # answer has come.
            answered, _ = await asyncio.wait((future,), timeout=_REPLY_TIMEOUT_S)
        finally:
            self._waiting.pop(request_id, None)
        if not answered:
            raise RequestError(
                f"the supervisor did not answer {verb} within {_REPLY_TIMEOUT_S:g} s",
                ErrorKind.INTERNAL,
            )
        return future.result()
