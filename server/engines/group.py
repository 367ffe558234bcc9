"""One worker group as the front end sees it: its connection and its running requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimaran.comm.messages.bulk import unpack
from trimaran.comm.messages.messages import (
    AdapterTaken,
    FinishReason,
    Message,
    Release,
    StepOutput,
    Submit,
)
from trimaran.server.engines.link import EngineLink
from trimaran.server.engines.live_request import LiveRequest
from trimaran.server.engines.routing import GroupLoad

_REASONS = tuple(FinishReason)


@dataclass(slots=True, eq=False)
class EngineGroup:
    """A group of one generation of a model."""

    name: str
    on_end: Callable[[LiveRequest], None]
    """Called with each request that came to its end by itself."""

    link: EngineLink | None = None
    """None while the group is down."""

    incarnation: int = -1
    ended_incarnation: int = -1
    """The last incarnation that the supervisor reported as down. Its rank 0 may still dial
    in again, and is refused."""

    num_restarts: int = 0
    failure: str = ""
    """Why the group will not come back; empty if it may."""

    facts: dict[str, Any] = field(default_factory=dict)
    live: dict[int, LiveRequest] = field(default_factory=dict)
    offered: dict[int, Submit] = field(default_factory=dict)
    """Requests with adapter weights that the group has neither accepted nor refused yet.
    Clients may have cancelled these requests."""

    load: GroupLoad = field(default_factory=GroupLoad)
    give_up: asyncio.TimerHandle | None = None
    """Fails the waiting requests of a group that stays away."""

    def num_requests(self) -> int:
        """Requests that run or wait at this group."""
        return len(self.live)

    def take(self, request: LiveRequest) -> None:
        """Add a request to the group's requests and load."""
        self.live[request.request_id] = request
        self.load.output_tokens += request.num_left
        self.load.context_tokens += request.context_tokens
        request.submit.group = self.name

    def tell(self, message: Message) -> None:
        """Send a message, if the group is up."""
        if self.link is not None:
            self.link.send(message)

    def ask(self, submit: Submit) -> None:
        """Send a request."""
        if "weights" in (submit.adapter or {}):
            self.offered[submit.request_id] = submit
        self.tell(submit)

    def take_offered(self, taken: AdapterTaken) -> dict[str, Any] | None:
        """The weights that the group accepted; None if another front end sent them."""
        for request_id, submit in self.offered.items():
            adapter = submit.adapter or {}
            if (submit.adapter_id, adapter["digest"]) == (taken.adapter_id, taken.digest):
                del self.offered[request_id]
                return adapter
        return None

    def remove(self, request_id: int) -> LiveRequest | None:
        """Remove a request from the group's requests and load."""
        request = self.live.pop(request_id, None)
        if request is not None:
            self.load.output_tokens -= request.num_left
            self.context_done(request)
        return request

    def take_live(self) -> list[LiveRequest]:
        """Hand all requests over to the caller; the group has none afterwards."""
        if self.give_up is not None:
            self.give_up.cancel()
            self.give_up = None
        taken, self.live = list(self.live.values()), {}
        self.load.output_tokens = self.load.context_tokens = 0
        return taken

    def context_done(self, request: LiveRequest) -> None:
        """The request's prefill is complete."""
        self.load.context_tokens -= request.context_tokens
        request.context_tokens = 0

    def disconnect(self) -> None:
        """Close the connection and report no further event of it."""
        self.offered.clear()
        link, self.link = self.link, None
        if link is not None:
            link.retire()
            link.close()

    def retire(self) -> None:
        """Ignore the group from now on, but leave the connection to the group's ranks: an
        engine dials in again when the front end closes its connection."""
        link, self.link = self.link, None
        if link is not None:
            link.retire()

    def _extras(self, output: StepOutput) -> dict[int, dict[str, Any]]:
        """The extras of a step by row. Shared memory is released as soon as it is read."""
        if not output.bulk:
            return output.extras
        opened = unpack(output)
        self.tell(Release(numbers=output.bulk[-1:]))
        return opened

    def take_step(self, output: StepOutput) -> None:
        """Give every request of a step its tokens."""
        ids = np.frombuffer(output.request_ids, dtype="<u8").tolist()
        counts = np.frombuffer(output.num_tokens, dtype="<u2").tolist()
        reasons = np.frombuffer(output.finish_reasons, dtype=np.uint8).tolist()
        tokens = np.frombuffer(output.token_ids, dtype="<i4").tolist()
        live, extras = self.live, self._extras(output)
        start = 0
        self.load.output_tokens -= len(tokens)
        for row, request_id in enumerate(ids):
            end = start + counts[row]
            request = live.get(request_id)
            if request is None:
                self.load.output_tokens += end - start
            else:
                reason = _REASONS[reasons[row]]
                # Each request keeps its extras, and adds to them.
                request.push(tokens[start:end], reason, extras.get(row) or {} if extras else {})
                # A request that was cut off while it took its tokens has left already.
                if request.is_over and self.remove(request_id) is not None:
                    self.on_end(request)
            start = end
