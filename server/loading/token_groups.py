"""The worker groups behind token-level models: opened, awaited and closed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.engines.client import EngineClient
from trimaran.server.engines.model_engines import ModelEngines
from trimaran.server.loading.group_requests import GroupRequests
from trimaran.server.metrics.group_board import GroupBoard
from trimaran.server.repository.model_repository import RepositoryModel
from trimaran.server.repository.signatures import backend_minor

logger = logging.getLogger(__name__)

_READY_POLL_S = 0.02
_UNKNOWN_S = 5.0
_OF_ONE_JOB = ("job", "prestarted")


@dataclass(frozen=True, slots=True)
class OpenedGroups:
    """One generation of a model: its groups and their engines."""

    engines: ModelEngines
    groups: tuple[str, ...]
    generation: int


class TokenGroups:
    """Opens and closes generations of token-level models.

    Numbers the generations of each model, so that group names are unique in the life of a
    server.
    """

    def __init__(
        self,
        requests: GroupRequests,
        engines: EngineClient,
        board: GroupBoard,
        released: Callable[[Sequence[str]], Awaitable[None]] | None = None,
    ) -> None:
        """``released`` returns once other front ends no longer use these groups."""
        self._requests = requests
        self._engines = engines
        self._board = board
        self._released = released
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks that end groups whose start was cancelled before the supervisor answered."""

        self.generations: dict[str, int] = {}
        """The last generation of each model."""

    def adopt(
        self, source: RepositoryModel, generation: int, groups: Sequence[str]
    ) -> OpenedGroups:
        """Use groups that are already started."""
        version = str(source.versions[-1])
        minor = backend_minor(source.config, source.folder / version)
        self._engines.metrics.set_backend_version(source.name, version, minor)
        return self.adopt_of(source.name, version, generation, groups)

    def adopt_of(
        self, model: str, version: str, generation: int, groups: Sequence[str]
    ) -> OpenedGroups:
        """Use the groups of a model whose files may be gone."""
        last = self.generations.get(model, 0)
        self.generations[model] = max(last, generation)
        engines = self._engines.add_model(model, version, generation, tuple(groups))
        return OpenedGroups(engines, tuple(groups), generation)

    async def open(
        self, source: RepositoryModel, before_start: Callable[[], None]
    ) -> OpenedGroups:
        """Request the start of the next generation; returns before its engines are up.

        ``before_start`` is called when the generation has its number.

        Raises:
            GroupsRefusedError: no process was started.
        """
        generation = self.generations.get(source.name, 0) + 1
        self.generations[source.name] = generation
        before_start()
        starting = asyncio.ensure_future(self._requests.start(source, generation))
        try:
            groups = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A separate task continues if this task is cancelled again.
            ending = asyncio.ensure_future(self._end_started(starting))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            await asyncio.shield(ending)
            raise
        return self.adopt(source, generation, groups)

    async def _end_started(self, starting: asyncio.Future[tuple[str, ...]]) -> None:
        """End requested groups that are no longer needed; they may have started."""
        try:
            groups = await starting
        except RequestError as error:
            # The start was refused or not answered.
            logger.info("groups whose start was cancelled: %s", error)
            return
        await self.close(None, groups)

    async def wait_up(self, opened: OpenedGroups) -> None:
        """Return once every group serves.

        Raises:
            RequestError: a group failed and is not started again.
        """
        while True:
            states = [self._board.group(group) for group in opened.groups]
            for state in states:
                if state is not None and state["state"] == "failed":
                    raise RequestError(
                        f"its worker group '{state['group']}' failed: {state['text']}",
                        ErrorKind.INTERNAL,
                    )
            if all(group.link is not None for group in opened.engines.groups.values()):
                return
            await asyncio.sleep(_READY_POLL_S)

    def why_lasting(self, groups: Sequence[str]) -> str:
        """Why these groups cannot end while the server runs; empty if they can."""
        for name in groups:
            state = self._board.group(name)
            if state is not None and state["start_method"] in _OF_ONE_JOB:
                return (
                    f"its worker group '{name}' is part of an MPI job that ends as a whole. "
                    "Stop the server, or start it so that each group has processes of its own "
                    "(trimaran serve --multi-model, not under mpirun and without "
                    "--disable-spawn-processes)."
                )
        return ""

    async def wait_known(self, opened: OpenedGroups) -> None:
        """Return once every group is reported up or down. A group unknown to the supervisor
        counts as down after a short time.
        """
        unknown_until_s = time.monotonic() + _UNKNOWN_S
        for name, group in opened.engines.groups.items():
            while group.link is None:
                state = self._board.group(name)
                if state is None and time.monotonic() > unknown_until_s:
                    break
                if state is not None and not _is_coming(state):
                    break
                await asyncio.sleep(_READY_POLL_S)

    async def close(self, engines: ModelEngines | None, groups: Sequence[str]) -> None:
        """End a generation: returns once its processes have ended and released their
        devices.
        """
        if groups and self._released is not None:
            await self._released(groups)
        # The engines are closed last: a group that dies in the meantime is restarted for
        # requests of other front ends, and this front end refuses unknown groups.
        if engines is not None:
            engines.close()
        if not groups:
            return
        try:
            await self._requests.stop(groups)
        except RequestError as error:
            logger.error("groups %s: %s", ", ".join(groups), error)
        for group in groups:
            self._board.remove(group)


def _is_coming(state: Mapping[str, Any]) -> bool:
    """Whether a group is about to dial in: the group is up or at its first start. The end of
    the start may be reported before the dial.
    """
    is_first_start = state["state"] == "starting" and not state["num_restarts"]
    return is_first_start or bool(state["state"] == "up")
