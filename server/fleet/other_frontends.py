"""The first front end's side of its followers: sends them the state, adds up their counts."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

from trimaran.comm.errors import RequestError
from trimaran.comm.transport.sockets import Address
from trimaran.server.config import FrontendConfig, frontend_title
from trimaran.server.fleet.administration import Administration
from trimaran.server.fleet.peer_link import PeerLink, SharedState, Verb
from trimaran.server.inference.registry import ModelRegistry
from trimaran.server.metrics.group_board import GroupBoard
from trimaran.server.metrics.other_counts import OtherCounts
from trimaran.server.protocol.load_request import LoadRequest
from trimaran.server.settings import LogSettings, TraceSettings
from trimaran.server.shared_memory.region_specs import RegionSpec
from trimaran.server.shared_memory.regions import SharedRegions

logger = logging.getLogger(__name__)

_UPDATE_TIMEOUT_S = 5.0
"""Shorter than the followers' own time limit for their questions."""

_SERVED_MARGIN_S = 30.0
_JOIN_POLL_S = 0.02
_POLL_PERIOD_S = 2.0
_COUNTS_TIMEOUT_S = 2.0
"""A front end that is silent for longer counts as in its last answer."""


class AdministeredService(Administration, Protocol):
    """The service of the first front end, as followers use it."""

    log_settings: LogSettings
    trace_settings: TraceSettings
    regions: SharedRegions

    def own_counts(self) -> dict[str, Any]:
        """The counts of this front end alone."""


class OtherFrontends:
    """The front ends that share the ports with this one. Used on the event loop only.

    They serve the same models, and send administration requests here. While this front end is
    down, they go on with the last state.
    """

    def __init__(
        self,
        config: FrontendConfig,
        registry: ModelRegistry,
        board: GroupBoard,
        counts: OtherCounts,
    ) -> None:
        self._config = config
        self._board = board
        self._registry = registry
        self._counts = counts
        self._service: AdministeredService | None = None
        self._server: asyncio.Server | None = None
        self._links: dict[int, PeerLink] = {}
        self._saved_state = b""
        self._id = secrets.token_hex(8)
        self._has_inherited = False
        self._round: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._is_stale = False
        self._sent_state: Mapping[str, Any] = {}
        self._following: set[asyncio.Task[None]] = set()
        """Questions that are answered once the state in question is served."""
        registry.on_change = self.publish

    async def start(self, service: AdministeredService) -> None:
        """Let followers join: from now on the loaded models are known."""
        if self._config.num_frontends == 1:
            return
        self._service = service
        verbs: dict[str, Verb] = {
            "join": self._join, "load": self._load, "unload": self._unload,
            "index": self._index, "statistics": self._statistics,
            "change_log_settings": self._change_log_settings,
            "change_trace_settings": self._change_trace_settings,
            "register_region": self._register_region,
            "unregister_region": self._unregister_region,
        }  # fmt: skip
        address = Address.parse(self._config.first_frontend)
        with suppress(FileNotFoundError):
            os.unlink(address.path)
        make_link = partial(PeerLink, verbs, self._lost)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(make_link, sock=address.listen())
        self._looking = asyncio.ensure_future(self._look())

    def close(self) -> None:
        """Close the connections of all followers."""
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            self._server.close()
        for link in self._links.values():
            link.close()

    # ---- state for followers ---------------------------------------------------------------

    def save_state(self, state: bytes) -> None:
        """Take the models that are loaded now (`SavedState`)."""
        self._saved_state = state
        self.publish()

    def publish(self) -> None:
        """Send the state soon: several changes in one step of the event loop go together."""
        self._is_stale = True
        if self._links and (self._round is None or self._round.done()):
            self._round = asyncio.ensure_future(self._update_all())

    async def await_update(self) -> None:
        """Return once followers know the current state and serve no other models. Models that
        need a start may still be starting.
        """
        while self._round is not None and not self._round.done():
            await asyncio.shield(self._round)

    async def served(self, name: str, load_s: float) -> None:
        """Return once each follower serves a model of this front end, has failed to serve the
        model, or has exceeded its time limit. The load took ``load_s`` here.
        """
        await self.await_update()
        # Front ends load at the same time, on the same processors.
        limit_s = _SERVED_MARGIN_S + load_s * self._config.num_frontends
        links = list(self._links.values())
        questions = [link.ask("serves", limit_s, name=name) for link in links]
        answers = await asyncio.gather(*questions, return_exceptions=True)
        for link, answer in zip(links, answers, strict=True):
            if isinstance(answer, BaseException):
                logger.warning(
                    "front end %d does not serve model '%s' yet: %s", link.index, name, answer
                )
            else:
                self._counts.caught_up(link.index, name)

    async def released(self, groups: Sequence[str]) -> None:
        """Return once no follower has requests on these groups, which followers may no longer
        use.
        """
        # Followers that outlive the first front end may join its successor after this question.
        while any(map(self._is_expected, range(1, self._config.num_frontends))):
            await asyncio.sleep(_JOIN_POLL_S)
        questions = [link.ask("release", groups=list(groups)) for link in self._links.values()]
        # A front end that has ended holds no requests.
        await asyncio.gather(*questions, return_exceptions=True)

    def _is_expected(self, index: int) -> bool:
        """Whether a front end that has not joined yet may hold requests."""
        if index in self._links:
            return False
        state = self._board.group(frontend_title(index))
        return state is None or bool(state["state"] == "up")

    async def _look(self) -> None:
        """Ask followers for their counts periodically: the counts since the last report of a
        follower that dies are lost.
        """
        while True:
            await asyncio.sleep(_POLL_PERIOD_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Bring the followers' counts up to date here, and send them the legacy of this front
        end.
        """
        links = list(self._links.items())
        if not links:
            return
        assert self._service is not None
        legacy = {"of": self._id, **self._counts.legacy(self._service.own_counts())}
        await asyncio.gather(*(self._count(index, link, legacy) for index, link in links))

    async def _count(self, index: int, link: PeerLink, legacy: Mapping[str, Any]) -> None:
        try:
            counts = await link.ask("counts", _COUNTS_TIMEOUT_S, legacy=legacy)
        except RequestError as error:
            logger.warning("the counts of front end %d are old: %s", index, error)
            return
        # The counts of silent front ends are missing: their next answers may catch up.
        if self._links.get(index) is link:
            self._counts.take(index, counts)

    async def _update_all(self) -> None:
        while self._is_stale:
            await asyncio.sleep(0)
            self._is_stale = False
            wire = self._sent_state = self._state().to_wire()
            await asyncio.gather(*(self._update(link, wire) for link in self._links.values()))

    async def _update(self, link: PeerLink, wire: Mapping[str, Any]) -> None:
        following = asyncio.ensure_future(self._followed(link, wire))
        self._following.add(following)
        following.add_done_callback(self._following.discard)
        # The state is sent first: a later question is answered after the state is applied.
        await asyncio.sleep(0)
        try:
            await link.ask("heard", _UPDATE_TIMEOUT_S)
        except RequestError as error:
            logger.warning("front end %d does not follow: %s", link.index, error)

    async def _followed(self, link: PeerLink, wire: Mapping[str, Any]) -> None:
        try:
            await link.ask("state", **wire)
        except RequestError as error:
            logger.warning("front end %d does not follow: %s", link.index, error)
        else:
            # A state sent meanwhile is answered for both, and may still be on its way.
            if wire is self._sent_state and not self._is_stale:
                self._counts.caught_up(link.index)

    def _state(self) -> SharedState:
        assert self._service is not None
        return SharedState(
            saved_state=self._saved_state,
            states=tuple(self._registry.not_ready()),
            log_settings=self._service.log_settings.values(),
            trace_settings=self._service.trace_settings.changed,
            regions=tuple(self._service.regions.to_wire()),
        )

    # ---- questions of followers ----------------------------------------------------------

    async def _join(self, link: PeerLink, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if not hmac.compare_digest(arguments["token"].encode(), self._config.token.encode()):
            link.close()
            return {}
        link.index = int(arguments["index"])
        before = self._links.pop(link.index, None)
        if before is not None:
            before.close()
            self._counts.lost(link.index)
        self._links[link.index] = link
        legacy = arguments["legacy"]
        # All followers that outlived the predecessor bring the same legacy.
        if legacy and legacy["of"] != self._id and not self._has_inherited:
            self._has_inherited = True
            self._counts.inherit(legacy)
        logger.info("Front end %d has joined", link.index)
        self.publish()
        return {}

    def _lost(self, link: PeerLink) -> None:
        if self._links.get(link.index) is link:
            del self._links[link.index]
            self._counts.lost(link.index)

    def _of(self, link: PeerLink) -> AdministeredService:
        assert self._service is not None
        if link.index not in self._links:
            raise RequestError("a front end has to join first")
        return self._service

    async def _load(self, link: PeerLink, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        await self._of(link).load(LoadRequest(**arguments))
        return {}

    async def _unload(self, link: PeerLink, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        await self._of(link).unload(**arguments)
        return {}

    async def _index(self, link: PeerLink, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        entries = await self._of(link).index(**arguments)
        return {"entries": [asdict(entry) for entry in entries]}

    async def _statistics(
        self, link: PeerLink, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        message = await self._of(link).statistics(**arguments)
        return {"message": message.SerializeToString()}

    async def _change_log_settings(
        self, link: PeerLink, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        await self._of(link).change_log_settings(arguments["changes"])
        return {}

    async def _change_trace_settings(
        self, link: PeerLink, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        await self._of(link).change_trace_settings(**arguments)
        return {}

    async def _register_region(
        self, link: PeerLink, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        await self._of(link).register_region(RegionSpec.from_wire(arguments))
        return {}

    async def _unregister_region(
        self, link: PeerLink, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        await self._of(link).unregister_region(**arguments)
        return {}
