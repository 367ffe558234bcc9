"""All engines that serve this front end: acceptance of connections, and their owners."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterable
from functools import partial

from trimaran.comm.errors import ProtocolError
from trimaran.comm.messages.guarded_frames import Gate
from trimaran.comm.messages.messages import EngineHello, Message
from trimaran.comm.transport.sockets import Address
from trimaran.server.config import FrontendConfig
from trimaran.server.engines.group import EngineGroup
from trimaran.server.engines.link import BEING_ENDED, EngineLink
from trimaran.server.engines.model_engines import ModelEngines
from trimaran.server.engines.unread_logits import UnreadLogits
from trimaran.server.metrics.metrics import Metrics


class EngineClient:
    """The worker groups of all models by name. Used on the event loop only."""

    def __init__(self, config: FrontendConfig, metrics: Metrics) -> None:
        self.config = config
        self.metrics = metrics
        self.unread_logits = UnreadLogits(config.max_unread_logits_bytes)
        self.expects_the_end = False
        """Whether an engine that closes its connection ends in order."""
        self.num_lost = 0
        """Requests of all models that failed because groups died."""
        self._ids = itertools.count(1)
        self._owners: dict[str, ModelEngines] = {}
        self._states: dict[str, tuple[str, int, str]] = {}
        self._servers: list[asyncio.Server] = []
        self._early: dict[str, tuple[EngineLink, EngineHello]] = {}

    async def start(self) -> None:
        """Listen for groups that dial in."""
        loop = asyncio.get_running_loop()
        for text in self.config.engine_listen:
            address = Address.parse(text)
            if address.path and os.path.exists(address.path):
                os.unlink(address.path)
            gate = Gate("engines' port", self.config.token, is_remote=not address.path)
            make_link = partial(EngineLink, self, gate)
            server = await loop.create_server(make_link, sock=address.listen())
            self._servers.append(server)

    async def close(self) -> None:
        """Stop listening and close every connection."""
        self.expects_the_end = True
        for server in self._servers:
            server.close()
        for engines in self._models():
            for group in engines.groups.values():
                group.disconnect()
            engines.close("the server ends")

    def add_model(
        self, model: str, version: str, generation: int, groups: Iterable[str]
    ) -> ModelEngines:
        """Let these groups dial in as one generation of a model.

        The names are unique in the life of a server. Generations of one model live side by
        side until they are closed.
        """
        engines = ModelEngines(self, model, version, generation, groups)
        for name in engines.groups:
            assert name not in self._owners, name
            self._owners[name] = engines
            if name in self._states:
                engines.state_changed(engines.groups[name], *self._states[name])
            if name in self._early:
                engines.link_ready(*self._early.pop(name))
        return engines

    def remove_model(self, engines: ModelEngines) -> None:
        """Forget the groups of a generation, and with the last one their metrics."""
        for name in engines.groups:
            if self._owners.get(name) is engines:
                del self._owners[name]
                self._states.pop(name, None)
                self.metrics.remove_group(engines.model, engines.version, name)
        shown = {(each.model, each.version) for each in self._models()}
        if (engines.model, engines.version) not in shown:
            self.metrics.remove_engine(engines.model, engines.version)

    def is_known(self, group: str) -> bool:
        """Whether a model runs on this group."""
        return group in self._owners

    def next_id(self) -> int:
        """A request id that was never used."""
        return next(self._ids)

    def on_group_state(
        self, group: str, state: str, num_restarts: int = 0, text: str = "", **_: object
    ) -> None:
        """The supervisor reports the state of a group, which may be unknown yet. A ``failed``
        group will not come back."""
        self._states[group] = (state, num_restarts, text)
        owner = self._owners.get(group)
        if owner is not None:
            owner.state_changed(owner.groups[group], state, num_restarts, text)
        elif state == "down":
            # The supervisor reports nothing further about an unloaded group.
            del self._states[group]

    def expect_the_end(self) -> None:
        """From now on, an engine that closes its connection ends in order."""
        self.expects_the_end = True

    # ---- connections --------------------------------------------------------------------

    def refusal(self, hello: EngineHello) -> str:
        """Why this engine cannot serve here; empty if it can."""
        owner = self._owners.get(hello.group)
        if owner is None and not self.config.is_first:
            # The first front end decides, and may not have announced the group yet.
            return ""
        if owner is None or owner.model != hello.model:
            known = ", ".join(f"{name} of {e.model}" for name, e in self._owners.items())
            return f"group '{hello.group}' of model '{hello.model}' is unknown; known: {known}"
        group = owner.groups[hello.group]
        if hello.incarnation < group.incarnation:
            return f"incarnation {hello.incarnation} is older than {group.incarnation}"
        if hello.incarnation <= group.ended_incarnation:
            return f"incarnation {hello.incarnation} {BEING_ENDED}"
        return ""

    def link_ready(self, link: EngineLink, hello: EngineHello) -> None:
        """A warm group dialled in."""
        owner = self._owners.get(hello.group)
        if owner is not None:
            owner.link_ready(link, hello)
            return
        before, _ = self._early.get(hello.group, (None, None))
        if before is not None:
            before.retire()
            before.close()
        self._early[hello.group] = link, hello

    def link_lost(self, link: EngineLink) -> None:
        """A connection ended."""
        if self._is_early(link):
            del self._early[_hello(link).group]
            return
        owner, group = self._of(link)
        owner.link_lost(group)

    def message(self, link: EngineLink, message: Message) -> None:
        """Take one message of a group.

        Raises:
            ProtocolError: no message of an engine, or one that contradicts itself.
        """
        if self._is_early(link):
            return  # A statistics report: the group has no requests yet.
        owner, group = self._of(link)
        try:
            is_known = owner.message(group, message)
        except (ValueError, KeyError, IndexError) as error:
            raise ProtocolError(f"a broken {type(message).__name__}: {error}") from error
        if not is_known:
            raise ProtocolError(f"{type(message).__name__} is no message of an engine")

    def _of(self, link: EngineLink) -> tuple[ModelEngines, EngineGroup]:
        name = _hello(link).group
        owner = self._owners[name]
        return owner, owner.groups[name]

    def _is_early(self, link: EngineLink) -> bool:
        early, _ = self._early.get(_hello(link).group, (None, None))
        return early is link

    def _models(self) -> list[ModelEngines]:
        return list(dict.fromkeys(self._owners.values()))


def _hello(link: EngineLink) -> EngineHello:
    assert link.hello is not None
    return link.hello
