"""A follower's connection to the first front end: state comes in, questions go out."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tritonclient.grpc.service_pb2 import ModelStatisticsResponse

from trimaran.comm.errors import RequestError
from trimaran.comm.transport.sockets import Address
from trimaran.server.config import FrontendConfig
from trimaran.server.fleet.peer_link import PeerLink, SharedState, Verb
from trimaran.server.inference.registry import IndexEntry
from trimaran.server.protocol.load_request import LoadRequest
from trimaran.server.settings import Changes, checked_log_changes
from trimaran.server.shared_memory.region_specs import Kind, RegionSpec

logger = logging.getLogger(__name__)

_REDIAL_S = 0.05
_JOIN_TIMEOUT_S = 10.0
_ASK_TIMEOUT_S = 10.0
_RETRY_S = (1.0, 5.0, 30.0)
"""Pauses before a failed model is tried again here, in seconds."""


class FirstFrontend:
    """Keeps a connection to the first front end. Used on the event loop only."""

    def __init__(
        self,
        config: FrontendConfig,
        note: Callable[[SharedState], None],
        apply: Callable[[], Awaitable[bool]],
        settled: Callable[[str], Awaitable[None]],
        release: Callable[[Sequence[str]], Awaitable[None]],
        counts: Callable[[], Mapping[str, Any]],
    ) -> None:
        """``note`` takes in a state as far as possible at once; ``apply`` does the rest.
        ``settled`` returns once that is done for one model.
        """
        self._config = config
        self._note = note
        self._apply = apply
        self._settled = settled
        self._release = release
        self._counts = counts
        self._newest: SharedState | None = None
        self._applying = asyncio.Lock()
        self._again: asyncio.Task[None] | None = None
        self._has_state = asyncio.Event()
        self._is_lost = asyncio.Event()
        self._link: PeerLink | None = None
        self._legacy: Mapping[str, Any] = {}
        self.expects_the_end = False
        """Whether the server is shutting down, and the first front end with it."""

        self._verbs: dict[str, Verb] = {
            "state": self._on_state,
            "heard": self._on_update,
            "serves": self._on_serves,
            "release": self._on_release,
            "counts": self._on_counts,
        }

    async def run(self) -> None:
        """Stay connected, until cancelled."""
        try:
            await self._stay_connected()
        finally:
            self._stop_trying()

    async def _stay_connected(self) -> None:
        while True:
            self._link = await self._dial()
            await self._is_lost.wait()
            if not self.expects_the_end:
                logger.warning("the first front end is gone: what was served goes on")
            self._link = None

    async def told(self) -> None:
        """Return once this front end serves the models that the first one served at the
        question.
        """
        await self._has_state.wait()

    # ---- what only the first front end may do -------------------------------------------

    async def load(self, request: LoadRequest) -> None:
        """Load a model at all front ends.

        Raises:
            RequestError: the model was not loaded, or the first front end is down.
        """
        await self._open_link().ask("load", **asdict(request))

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Have a model unloaded.

        Raises:
            RequestError: clients may not, or the first front end is down.
        """
        await self._ask("unload", name=name, unload_dependents=unload_dependents)

    async def index(self, only_ready: bool) -> list[IndexEntry]:
        """The repository index.

        Raises:
            RequestError: the first front end is down.
        """
        answer = await self._ask("index", only_ready=only_ready)
        return [IndexEntry(**entry) for entry in answer["entries"]]

    async def statistics(self, name: str, version: str) -> ModelStatisticsResponse:
        """The counters of all front ends together.

        Raises:
            RequestError: no such model or version, or the first front end is down.
        """
        answer = await self._ask("statistics", name=name, version=version)
        message = ModelStatisticsResponse.FromString(answer["message"])
        assert isinstance(message, ModelStatisticsResponse)
        return message

    async def change_log_settings(self, changes: dict[str, Any]) -> None:
        """Change the log settings of all front ends.

        Raises:
            RequestError: a setting or a value is not allowed, or the first front end is down.
        """
        # Checked here: messages between front ends do not hold every value of JSON.
        await self._ask("change_log_settings", changes=checked_log_changes(changes))

    async def change_trace_settings(self, model: str, changes: Changes) -> None:
        """Change the trace settings of all front ends.

        Raises:
            RequestError: a setting or a value is not allowed, or the first front end is down.
        """
        await self._ask("change_trace_settings", model=model, changes=dict(changes))

    async def register_region(self, spec: RegionSpec) -> None:
        """Open memory of a client at all front ends.

        Raises:
            RequestError: the memory is refused, or the first front end is down.
        """
        await self._ask("register_region", **spec.to_wire())

    async def unregister_region(self, kind: Kind, name: str) -> None:
        """Forget memory of clients at all front ends.

        Raises:
            RequestError: clients may not share memory, or the first front end is down.
        """
        await self._ask("unregister_region", kind=kind, name=name)

    async def refresh(self) -> None:
        """Nothing to add up here: the first front end adds up the counts of all."""

    async def _ask(self, verb: str, **arguments: Any) -> Mapping[str, Any]:
        return await self._open_link().ask(verb, _ASK_TIMEOUT_S, **arguments)

    def _open_link(self) -> PeerLink:
        # A closed link reports by itself that the other end is gone.
        return self._link if self._link is not None else PeerLink({}, lambda _: None)

    # ---- connection ---------------------------------------------------------------------

    async def _dial(self) -> PeerLink:
        loop = asyncio.get_running_loop()
        path = Address.parse(self._config.first_frontend).path
        while True:
            self._is_lost.clear()
            link = self._new_link()
            try:
                await loop.create_unix_connection(lambda made=link: made, path)  # type: ignore[misc]
                who = {"token": self._config.token, "index": self._config.index}
                await link.ask("join", _JOIN_TIMEOUT_S, **who, legacy=self._legacy)
                return link
            except (OSError, RequestError):
                # The first front end is still loading, or being restarted.
                link.close()
                await asyncio.sleep(_REDIAL_S)

    def _new_link(self) -> PeerLink:
        return PeerLink(self._verbs, lambda _: self._is_lost.set())

    # ---- reports of the first front end --------------------------------------------------

    async def _on_state(self, link: PeerLink, wire: Mapping[str, Any]) -> Mapping[str, Any]:
        self._stop_trying()
        state = self._newest = SharedState.from_wire(wire)
        self._note(state)
        is_complete = await self._follow(state)
        if state is self._newest:
            self._stop_trying()
            if not is_complete:
                self._again = asyncio.ensure_future(self._try_again(state))
            self._has_state.set()
        return {}

    async def _on_update(
        self, link: PeerLink, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        # Every state that came before this question has been noted.
        return {}

    async def _on_serves(
        self, link: PeerLink, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        await self._settled(arguments["name"])
        return {}

    async def _follow(self, state: SharedState) -> bool:
        async with self._applying:
            # A state that came meanwhile is noted already, and applied next.
            return state is not self._newest or await self._apply()

    async def _try_again(self, state: SharedState) -> None:
        """Retry models that could not be served, until they are served."""
        for pause_s in itertools.chain(_RETRY_S, itertools.repeat(_RETRY_S[-1])):
            await asyncio.sleep(pause_s)
            if await self._follow(state):
                return

    def _stop_trying(self) -> None:
        if self._again is not None:
            self._again.cancel()

    async def _on_release(
        self, link: PeerLink, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        await self._release(arguments["groups"])
        return {}

    async def _on_counts(
        self, link: PeerLink, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        # A successor of the first front end gets the old counts from the followers only.
        self._legacy = arguments["legacy"]
        return self._counts()
