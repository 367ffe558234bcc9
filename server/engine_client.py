"""All engines that serve this front end: requests out, tokens in, replay after a death."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from trimaran.comm.address import Address
from trimaran.comm.errors import EngineDeadError, ErrorKind, ProtocolError, RequestError
from trimaran.comm.messages import (
    Cancel,
    EngineHello,
    FinishReason,
    Message,
    RequestFailed,
    StatsReport,
    StepOutput,
    Submit,
)
from trimaran.server.config import FrontendConfig
from trimaran.server.engine_link import EngineLink
from trimaran.server.live_request import LiveRequest
from trimaran.server.metrics import Metrics

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Group:
    """One worker group: its connection while it is up, and the requests it owes."""

    name: str
    model: str
    link: EngineLink | None = None
    incarnation: int = -1
    num_restarts: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    live: dict[int, LiveRequest] = field(default_factory=dict)
    give_up: asyncio.TimerHandle | None = None

    def take_live(self) -> dict[int, LiveRequest]:
        """Its requests, which are somebody else's from now on."""
        if self.give_up is not None:
            self.give_up.cancel()
            self.give_up = None
        taken, self.live = self.live, {}
        return taken


class EngineClient:
    """Submits requests to the groups of each model. Used on the event loop only.

    When a group's connection is lost, its requests go on at another group of the model,
    or wait for the group's next incarnation. Either goes on after the ids that clients
    already have.
    """

    def __init__(self, config: FrontendConfig, metrics: Metrics) -> None:
        self._config = config
        self._expects_the_end = False
        self._metrics = metrics
        self._ids = itertools.count(1)
        self._groups = {
            name: _Group(name, model)
            for model, names in config.groups.items()
            for name in names
        }
        self._versions: dict[str, str] = {}
        self._servers: list[asyncio.Server] = []
        self._handlers: dict[type[Message], Callable[[_Group, Any], None]] = {
            StepOutput: self._step_output,
            RequestFailed: self._request_failed,
            StatsReport: self._stats_report,
        }

    async def start(self) -> None:
        """Listen for groups that dial in."""
        loop = asyncio.get_running_loop()
        for text in self._config.engine_listen:
            address = Address.parse(text)
            if address.path and os.path.exists(address.path):
                os.unlink(address.path)
            make_link = partial(EngineLink, self, self._config.token)
            server = await loop.create_server(make_link, sock=address.listen())
            self._servers.append(server)

    async def close(self) -> None:
        """Stop listening and close every connection."""
        self._expects_the_end = True
        for server in self._servers:
            server.close()
        for group in self._groups.values():
            if group.give_up is not None:
                group.give_up.cancel()
            if group.link is not None:
                group.link.close()

    def set_version(self, model: str, version: str) -> None:
        """The version under which a model's engines are counted; at first "1"."""
        self._versions[model] = version

    def version(self, model: str) -> str:
        """The version under which a model's engines are counted."""
        return self._versions.get(model, "1")

    def is_ready(self, model: str) -> bool:
        """Whether a group of this model is up."""
        return any(g.link is not None for g in self._groups.values() if g.model == model)

    def facts(self, model: str) -> dict[str, Any]:
        """The facts of the model's engine, of its last incarnation.

        Raises:
            RequestError: no group of the model was ever up.
        """
        for group in self._groups.values():
            if group.model == model and group.facts:
                return group.facts
        raise self._unavailable(model)

    def submit(self, model: str, **fields: Any) -> LiveRequest:
        """Start one request on the least loaded group; ``fields`` are those of `Submit`.

        Raises:
            RequestError: no group of the model is up.
        """
        group = self._least_loaded(model)
        if group is None:
            raise self._unavailable(model)
        request_id, version = next(self._ids), self.version(model)
        submit = Submit(request_id=request_id, model=model, group=group.name, **fields)
        request = LiveRequest(
            submit,
            self._cancel,
            partial(self._metrics.observe_inter_token, model, version),
            partial(self._metrics.observe_time_to_first_token, model, version),
        )
        group.live[request_id] = request
        assert group.link is not None
        group.link.send(submit)
        return request

    def on_group_state(
        self, group: str, state: str, num_restarts: int = 0, **_: object
    ) -> None:
        """The supervisor's word on a group; ``failed`` means that it will not come back."""
        known = self._groups.get(group)
        if known is None:
            return
        known.num_restarts = num_restarts
        self._show_state(known)
        if state == "failed":
            self._give_up(known, "the group failed and is not started again")

    def expect_the_end(self) -> None:
        """From now on, an engine that closes its connection ends in order."""
        self._expects_the_end = True

    # ---- connections --------------------------------------------------------------------

    def refusal(self, hello: EngineHello) -> str:
        """Why this engine cannot serve here; empty if it can."""
        group = self._groups.get(hello.group)
        if group is None or group.model != hello.model:
            known = ", ".join(f"{g.name} of {g.model}" for g in self._groups.values())
            return f"group '{hello.group}' of model '{hello.model}' is unknown; known: {known}"
        if hello.incarnation < group.incarnation:
            return f"incarnation {hello.incarnation} is older than {group.incarnation}"
        return ""

    def link_ready(self, link: EngineLink, hello: EngineHello) -> None:
        """A warm group dialled in: it takes over what the last incarnation owed."""
        group = self._groups[hello.group]
        if group.link is not None:
            group.link.hello = None
            group.link.close()
        group.link, group.incarnation, group.facts = link, hello.incarnation, hello.facts
        logger.info("Group '%s' of model '%s' is up", group.name, group.model)
        self._metrics.set_engine_info(group.model, self.version(group.model), hello.facts)
        self._show_state(group)
        owed: dict[int, LiveRequest] = {}
        for other in self._groups.values():
            if other is group or (other.model == group.model and other.link is None):
                owed |= other.take_live()
        self._replay(owed, group)

    def link_lost(self, link: EngineLink) -> None:
        """A group died: its requests wait for the next incarnation."""
        assert link.hello is not None
        group = self._groups[link.hello.group]
        if group.link is not link:
            return
        group.link = None
        self._show_state(group)
        if self._expects_the_end:
            return
        other = self._least_loaded(group.model)
        if other is not None:
            logger.error(
                "Group '%s' of model '%s' is gone; %d requests go on at group '%s'",
                group.name, group.model, len(group.live), other.name,
            )  # fmt: skip
            self._replay(group.take_live(), other)
            return
        logger.error(
            "Group '%s' of model '%s' is gone; %d requests wait for its return",
            group.name, group.model, len(group.live),
        )  # fmt: skip
        why = f"the group did not come back within {self._config.replay_timeout_s:g} s"
        loop = asyncio.get_running_loop()
        group.give_up = loop.call_later(
            self._config.replay_timeout_s, self._give_up, group, why
        )

    def message(self, link: EngineLink, message: Message) -> None:
        """Take one message of a group.

        Raises:
            ProtocolError: no message of an engine, or one that contradicts itself.
        """
        assert link.hello is not None
        group = self._groups[link.hello.group]
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"{type(message).__name__} is no message of an engine")
        if group.link is not link:
            return
        try:
            handler(group, message)
        except (ValueError, KeyError, IndexError) as error:
            raise ProtocolError(f"a broken {type(message).__name__}: {error}") from error

    def _replay(self, requests: dict[int, LiveRequest], group: _Group) -> None:
        """Let this group, which is up, go on with requests of a group that died."""
        assert group.link is not None
        for request_id, request in requests.items():
            request.num_replays += 1
            if request.num_replays > self._config.max_replays:
                request.fail(
                    EngineDeadError(
                        f"the engine of model '{group.model}' died {request.num_replays} "
                        f"times under this request (limit {self._config.max_replays}); it "
                        "is not tried again"
                    )
                )
            else:
                group.live[request_id] = request
                group.link.send(request.replay_submit(group.name))
        if requests:
            logger.info("Group '%s': %d requests replayed", group.name, len(requests))

    def _give_up(self, group: _Group, why: str) -> None:
        for request in group.take_live().values():
            request.fail(EngineDeadError(f"the engine of model '{group.model}' is gone: {why}"))

    # ---- messages -----------------------------------------------------------------------

    def _step_output(self, group: _Group, output: StepOutput) -> None:
        ids = np.frombuffer(output.request_ids, dtype="<u8").tolist()
        counts = np.frombuffer(output.num_tokens, dtype="<u2").tolist()
        reasons = np.frombuffer(output.finish_reasons, dtype=np.uint8).tolist()
        tokens = np.frombuffer(output.token_ids, dtype="<i4").tolist()
        start = 0
        for row, request_id in enumerate(ids):
            end = start + counts[row]
            request = group.live.get(request_id)
            if request is not None:
                reason = FinishReason(reasons[row])
                if reason is not FinishReason.NOT_FINISHED:
                    del group.live[request_id]
                request.push(tokens[start:end], reason, output.extras.get(row, {}))
                if request.is_over:
                    self._observe_lengths(request)
            start = end

    def _request_failed(self, group: _Group, failure: RequestFailed) -> None:
        request = group.live.pop(failure.request_id, None)
        if request is not None:
            request.fail(RequestError(failure.text, ErrorKind[failure.kind]))

    def _stats_report(self, group: _Group, report: StatsReport) -> None:
        version = self.version(group.model)
        self._metrics.set_engine_stats(group.model, version, report.values)

    def _least_loaded(self, model: str) -> _Group | None:
        up = [g for g in self._groups.values() if g.model == model and g.link is not None]
        return min(up, key=lambda g: len(g.live), default=None)

    def _cancel(self, request: LiveRequest) -> None:
        group = self._groups[request.submit.group]
        group.live.pop(request.request_id, None)
        if group.link is not None:
            group.link.send(Cancel(request_ids=[request.request_id]))

    def _observe_lengths(self, request: LiveRequest) -> None:
        model, num_input = request.submit.model, len(request.submit.prompt_ids) // 4
        num_output = len(request.output_ids)
        self._metrics.observe_lengths(model, self.version(model), num_input, num_output)

    def _show_state(self, group: _Group) -> None:
        is_up = group.link is not None
        version = self.version(group.model)
        self._metrics.group_state(
            group.model, group.name, is_up, group.num_restarts, version=version
        )

    def _unavailable(self, model: str) -> RequestError:
        return EngineDeadError(
            f"Request for unknown model: '{model}' version {self.version(model)} is not at "
            "ready state: its engine is not running; try again in some seconds"
        )
