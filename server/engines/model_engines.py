"""The engines of one generation of a model: requests out, tokens in, replay after a death."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from trimaran.comm.errors import EngineDeadError, ErrorKind, RefusedError, RequestError
from trimaran.comm.messages.messages import (
    AdapterTaken,
    Cancel,
    EngineHello,
    ExpertReport,
    KeepAdapter,
    Message,
    RequestFailed,
    StatsReport,
    StepOutput,
    Stop,
    Submit,
)
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.server.config import FrontendConfig
from trimaran.server.engines.group import EngineGroup
from trimaran.server.engines.link import EngineLink
from trimaran.server.engines.live_request import LiveRequest
from trimaran.server.engines.routing import KnownPrefixes, Prompt, Router, block_hashes
from trimaran.server.engines.unread_logits import UnreadLogits
from trimaran.server.metrics.metrics import Metrics


class KnownAdapters:
    """One model's LoRA adapters by task id, least recently used first.

    A restarted group lacks adapters that clients still name by task id, so the front end
    keeps them. An adapter that a group refused is not kept. Every front end is told which
    adapters groups accept, so all front ends agree on the adapter of a task id.
    """

    def __init__(self) -> None:
        self._adapters: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._num_bytes = 0

    def use(self, task: int) -> None:
        """Mark the adapter of a request as used most recently; task 0 is none."""
        if task in self._adapters:
            self._adapters.move_to_end(task)

    def taken(
        self, taken: AdapterTaken, adapter: dict[str, Any] | None, max_bytes: int
    ) -> None:
        """Keep an adapter that a group accepted, within ``max_bytes`` for all adapters.

        ``adapter`` is None if another front end sent the weights; an older adapter of the
        same task id is dropped then.
        """
        known = self._adapters.get(taken.adapter_id)
        if known is not None and known["digest"] == taken.digest:
            self.use(taken.adapter_id)
            return
        self._forget(taken.adapter_id)
        if adapter is None:
            return
        self._adapters[taken.adapter_id] = adapter
        self._num_bytes += _size(adapter)
        while self._num_bytes > max_bytes:
            self._forget(next(iter(self._adapters)))

    def messages(self) -> Iterator[KeepAdapter]:
        """The messages that give all adapters to a restarted group."""
        for task, adapter in self._adapters.items():
            yield KeepAdapter(adapter_id=task, adapter=adapter, is_resent=True)

    def _forget(self, task: int) -> None:
        adapter = self._adapters.pop(task, None)
        if adapter is not None:
            self._num_bytes -= _size(adapter)


def _size(adapter: dict[str, Any]) -> int:
    return len(adapter["weights"]["data"])


logger = logging.getLogger(__name__)

_BLOCK_TOKENS, _MAX_BLOCKS = 32, 1 << 16
_LOGIT_BYTES = 4
"""Bytes of a logit, in the widest type."""


class EngineOwner(Protocol):
    """What the engines of one model need of the front end's engine client."""

    config: FrontendConfig
    metrics: Metrics
    unread_logits: UnreadLogits
    """Those of the streams of all models."""
    expects_the_end: bool
    """Whether an engine that closes its connection ends in order."""
    num_lost: int
    """Requests of all models that failed because their groups died."""

    def next_id(self) -> int:
        """A request id that was never used."""

    def remove_model(self, engines: ModelEngines) -> None:
        """Forget the groups of these engines."""


class ModelEngines:
    """Submits requests to the groups. Used on the event loop only.

    When a group's connection is lost, its requests are replayed at other groups of the
    generation, or wait for the first group that comes back. A replayed request continues
    after the ids that clients already have.
    """

    def __init__(
        self,
        owner: EngineOwner,
        model: str,
        version: str,
        generation: int,
        groups: Iterable[str],
    ) -> None:
        self.model = model
        self.version = version
        self.generation = generation
        self.groups = {name: EngineGroup(name, self._ended) for name in groups}
        self._owner = owner
        self._config: FrontendConfig = owner.config
        self._metrics: Metrics = owner.metrics
        self._router = Router()
        self._adapters = KnownAdapters()
        self._metrics.add_engine(model, version)
        self._series = self._metrics.request_series(model, version)
        self.on_stop: Callable[[str], None] = lambda client_request_id: None
        """Called when another front end was asked to stop an id."""
        self._handlers: dict[type[Message], Callable[[EngineGroup, Any], None]] = {
            StepOutput: EngineGroup.take_step,
            RequestFailed: self._request_failed,
            AdapterTaken: self._adapter_taken,
            StatsReport: self._stats_report,
            ExpertReport: self._expert_report,
            Stop: self._stopped_elsewhere,
        }
        for group in self.groups.values():
            self._show_state(group)
            self._metrics.count_group(model, version, group.name, group.num_requests)

    @property
    def is_ready(self) -> bool:
        """Whether a group is up."""
        # Asked several times a request: without a list or a generator.
        for group in self.groups.values():  # noqa: SIM110
            if group.link is not None:
                return True
        return False

    @property
    def unread_logits(self) -> UnreadLogits:
        """Those of all models' answers."""
        return self._owner.unread_logits

    def facts(self) -> dict[str, Any]:
        """The facts of the engine, of its last incarnation.

        Raises:
            RequestError: no group was ever up.
        """
        for group in self.groups.values():
            if group.facts:
                return group.facts
        raise self._unavailable()

    def submit(self, *, has_begun: bool = False, **fields: Any) -> LiveRequest:
        """Start one request; ``fields`` are those of `Submit`.

        With ``has_begun`` the request goes on with another one, and waits for a group that
        restarts as replayed requests do.

        Raises:
            RequestError: no group is up.
        """
        up = self._up()
        restarting = [group for group in self.groups.values() if not group.failure]
        if not up and not (has_begun and restarting):
            raise self._unavailable()
        submit = Submit(request_id=self._owner.next_id(), model=self.model, **fields)
        request = LiveRequest(
            submit,
            self._cancel,
            self._series.inter_token.observe,
            self._context_done,
            self._owner.unread_logits,
        )
        self._adapters.use(submit.adapter_id)
        if not up:
            self._park([request], restarting[0])
            return request
        group = self._choose(up, request)
        group.take(request)
        group.ask(submit)
        return request

    def stop(self, client_request_id: str) -> None:
        """End the requests that clients gave this id, at every front end."""
        if self._config.num_frontends > 1:
            for group in self.groups.values():
                group.tell(Stop(client_request_id=client_request_id))

    def close(self, why: str = "the model was unloaded") -> None:
        """Forget the groups and fail their remaining requests. Idempotent."""
        for group in self.groups.values():
            group.failure = why
            self._give_up(group, why)
            group.retire()
        self._owner.remove_model(self)

    def let_go(self) -> None:
        """Forget the groups without ending them: they dial in again to the next front end."""
        for group in self.groups.values():
            group.disconnect()
        self.close()

    # ---- groups that come and go --------------------------------------------------------

    def link_ready(self, link: EngineLink, hello: EngineHello) -> None:
        """A warm group dialled in: it takes over the waiting requests."""
        group = self.groups[hello.group]
        died = group.take_live() if group.link is not None else []
        group.disconnect()
        group.link, group.incarnation, group.facts = link, hello.incarnation, hello.facts
        group.failure = ""
        group.load.prefixes = self._prefixes(hello.facts)
        token_bytes = hello.facts.get("vocab_size_padded", 0) * _LOGIT_BYTES
        self._owner.unread_logits.fit(token_bytes)
        logger.info("Group '%s' of model '%s' is up", group.name, self.model)
        self._metrics.set_engine_info(self.model, self.version, hello.facts, group.name)
        self._show_state(group)
        for kept in self._adapters.messages():
            group.tell(kept)
        interrupted = self._survivors(died) + group.take_live()
        for other in self.groups.values():
            if other.link is None:
                interrupted += other.take_live()
        self._replay(interrupted)

    def link_lost(self, group: EngineGroup) -> None:
        """A group died: its requests are replayed at other groups, or wait."""
        group.disconnect()
        self._show_state(group)
        self._metrics.drop_engine_stats(self.model, self.version, group.name)
        if not self._owner.expects_the_end:
            self._move(group, self._survivors(group.take_live()), "is gone")

    def state_changed(self, group: EngineGroup, state: str, restarts: int, text: str) -> None:
        """The supervisor reports a group's state, maybe before the connection ends."""
        is_up = group.link is not None
        if is_up and restarts < group.incarnation:
            return  # A late report about an earlier incarnation.
        group.num_restarts = restarts
        if state == "failed":
            group.failure = "the group failed and is not started again"
            if text:
                group.failure += f": {text}"
        elif state in ("starting", "up"):
            group.failure = ""
            group.ended_incarnation = -1
        self._show_state(group)
        # The supervisor also reports "starting" until it hears that the group is ready.
        is_next = state == "starting" and restarts > group.incarnation
        if is_up and (state in ("down", "failed") or is_next):
            group.ended_incarnation = group.incarnation
            self.link_lost(group)
        elif state == "failed" and not self._owner.expects_the_end:
            self._move(group, group.take_live(), "failed")

    def message(self, group: EngineGroup, message: Message) -> bool:
        """Take one message of a group; False if engines do not send such messages."""
        handler = self._handlers.get(type(message))
        if handler is None:
            return False
        handler(group, message)
        return True

    def _survivors(self, requests: Sequence[LiveRequest]) -> list[LiveRequest]:
        """The requests of a dead group that may be replayed; the others fail."""
        limit = self._config.max_replays
        found = []
        for request in requests:
            request.num_deaths += 1
            if request.num_deaths <= limit:
                found.append(request)
                continue
            error = (
                f"the engine of model '{self.model}' died {request.num_deaths} times under "
                f"this request (limit {limit}); it is not tried again"
            )
            request.fail(EngineDeadError(error))
        self._count_lost(len(requests) - len(found))
        return found

    def _move(self, group: EngineGroup, requests: Sequence[LiveRequest], what: str) -> None:
        """Replay the requests of a group that is down at other groups, or let them wait."""
        up = self._up()
        waits_at = group
        if group.failure:
            waits_at = next((g for g in self.groups.values() if not g.failure), group)
        if not requests:
            then = "no request waits"
        elif up:
            then = f"{len(requests)} requests go on at {', '.join(g.name for g in up)}"
        elif waits_at.failure:
            then = f"{len(requests)} requests fail"
        else:
            then = f"{len(requests)} requests wait for group '{waits_at.name}'"
        logger.error("Group '%s' of model '%s' %s: %s", group.name, self.model, what, then)
        if up:
            self._replay(requests)
        elif waits_at.failure:
            self._fail(requests, group.failure)
        elif requests:
            self._park(requests, waits_at)

    def _park(self, requests: Sequence[LiveRequest], group: EngineGroup) -> None:
        """Let requests wait for a group that is down."""
        for request in requests:
            group.take(request)
        if group.give_up is None:
            why = f"the group did not come back within {self._config.replay_timeout_s:g} s"
            loop = asyncio.get_running_loop()
            group.give_up = loop.call_later(
                self._config.replay_timeout_s, self._give_up, group, why
            )

    def _replay(self, requests: Sequence[LiveRequest]) -> None:
        """Replay requests of a dead group at groups that are up."""
        up = self._up()
        for request in requests:
            group = self._choose(up, request)
            group.take(request)
            group.ask(request.replay_submit())
        if requests:
            self._metrics.count_replays(self.model, self.version, len(requests))
            logger.info("Model '%s': %d requests replayed", self.model, len(requests))

    def _give_up(self, group: EngineGroup, why: str) -> None:
        self._fail(group.take_live(), why)

    def _fail(self, requests: Sequence[LiveRequest], why: str) -> None:
        self._count_lost(len(requests))
        for request in requests:
            request.fail(EngineDeadError(f"the engine of model '{self.model}' is gone: {why}"))

    def _count_lost(self, num_requests: int) -> None:
        self._owner.num_lost += num_requests
        self._metrics.count_lost(self.model, self.version, num_requests)

    # ---- routing ------------------------------------------------------------------------

    def _up(self) -> list[EngineGroup]:
        return [group for group in self.groups.values() if group.link is not None]

    def _prefixes(self, facts: dict[str, Any]) -> KnownPrefixes | None:
        """The empty prefix record of a new incarnation; None if routing needs none."""
        mode = self._config.routing
        if len(self.groups) < 2 or mode == "least_loaded":
            return None
        if mode == "auto" and not facts.get("reuses_blocks", False):
            return None
        return KnownPrefixes(int(facts.get("max_blocks", _MAX_BLOCKS)))

    def _choose(self, up: Sequence[EngineGroup], request: LiveRequest) -> EngineGroup:
        """Choose a group for a request and record the prompt's prefix there."""
        submit = request.submit
        num_tokens = len(submit.prompt_ids) // 4 + len(request.output_ids)
        size = _block_size(up[0])
        hashes: Sequence[int] = ()
        if any(group.load.prefixes is not None for group in up):
            hashes = _hashes(submit, submit.prompt_ids, size)
        prompt = Prompt(num_tokens, request.num_left, hashes, size)
        loads = [group.load for group in up]
        group = up[self._router.choose(loads, prompt) if len(up) > 1 else 0]
        request.context_tokens = num_tokens - prompt.num_known(group.load)
        if group.load.prefixes is not None:
            group.load.prefixes.add(hashes)
        return group

    # ---- requests -----------------------------------------------------------------------

    def _context_done(self, request: LiveRequest, first_token_s: float | None) -> None:
        """A request has its first token, or the first token after a replay."""
        self.groups[request.submit.group].context_done(request)
        if first_token_s is not None:
            self._series.first_token.observe(first_token_s)

    def _ended(self, request: LiveRequest) -> None:
        """A request finished. Its prompt and output are the prefix of the next chat turn."""
        submit, num_output = request.submit, request.num_output_tokens
        self._series.input_tokens.observe(len(submit.prompt_ids) // 4)
        self._series.output_tokens.observe(num_output)
        # At most the limit of one output: beams count once.
        self._router.finished(request.max_tokens, min(num_output, request.max_tokens))
        group = self.groups[submit.group]
        if group.load.prefixes is not None:
            ids = submit.prompt_ids + pack_ids(request.output_ids)
            group.load.prefixes.add(_hashes(submit, ids, _block_size(group)))

    def _cancel(self, request: LiveRequest) -> None:
        group = self.groups[request.submit.group]
        group.remove(request.request_id)
        group.tell(Cancel(request_ids=[request.request_id]))

    def _request_failed(self, group: EngineGroup, failure: RequestFailed) -> None:
        request = group.remove(failure.request_id)
        group.offered.pop(failure.request_id, None)
        if request is not None:
            kind = ErrorKind[failure.kind]
            # An engine reports UNAVAILABLE only for requests that it has not begun.
            is_refused = kind is ErrorKind.UNAVAILABLE
            request.fail(
                RefusedError(failure.text) if is_refused else RequestError(failure.text, kind)
            )

    def _adapter_taken(self, group: EngineGroup, taken: AdapterTaken) -> None:
        """A group accepted adapter weights, sent by this or by another front end."""
        adapter = group.take_offered(taken)
        max_bytes = int(group.facts.get("lora_host_bytes", 0))
        self._adapters.taken(taken, adapter, max_bytes)
        if adapter is None:
            return
        for other in self._up():
            if other is not group:
                other.tell(KeepAdapter(adapter_id=taken.adapter_id, adapter=adapter))

    def _stats_report(self, group: EngineGroup, report: StatsReport) -> None:
        self._metrics.set_engine_stats(
            self.model, self.version, report.values, group.name, group.incarnation
        )

    def _stopped_elsewhere(self, group: EngineGroup, stop: Stop) -> None:
        self.on_stop(stop.client_request_id)

    def _expert_report(self, group: EngineGroup, report: ExpertReport) -> None:
        self._metrics.add_expert_tokens(
            self.model, self.version, report, group.name, group.incarnation
        )

    # ---- state in metrics ------------------------------------------------------------------

    def _show_state(self, group: EngineGroup) -> None:
        self._metrics.group_state(
            self.model, group.name, group.link is not None, group.num_restarts, self.version
        )

    def _unavailable(self) -> RequestError:
        failures = [group.failure for group in self.groups.values()]
        why = "its engine is not running; try again in some seconds"
        if failures and all(failures):
            why = failures[0]
        return EngineDeadError(
            f"Request for unknown model: '{self.model}' version {self.version} is not at "
            f"ready state: {why}"
        )


def _block_size(group: EngineGroup) -> int:
    return int(group.facts.get("tokens_per_block", _BLOCK_TOKENS))


def _hashes(submit: Submit, ids: bytes, tokens_per_block: int) -> list[int]:
    adapter = (submit.adapter or {}).get("name") or submit.adapter_id
    return block_hashes(ids, tokens_per_block, (submit.cache_salt, adapter))
