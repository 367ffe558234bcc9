"""The table of all process groups of one server, their restart budgets and their states."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from trimaran.comm.messages.messages import Command
from trimaran.launcher.config import GroupConfig, RestartPolicy
from trimaran.launcher.starters.children import Children, CommandStarter
from trimaran.launcher.starters.run_dir import MpiSessionDirs
from trimaran.launcher.starters.slurm_step import StepStarter
from trimaran.launcher.starters.spawn_starter import SpawnClient, SpawnStarter
from trimaran.launcher.starters.starter import FRONTEND, ORCHESTRATOR, GroupSpec, Starter
from trimaran.launcher.supervisor.child_connections import ChildConnection
from trimaran.launcher.supervisor.group import Group, GroupEvents, GroupState
from trimaran.launcher.supervisor.group_specs import PRESTARTED, SpecMaker

_MAX_DOUBLINGS = 64
"""Exponent above the longest pause in any case; keeps the power within a float."""

_FREE_WINDOW_S = 60.0
_FREE_MAX_DELAY_S = 5.0
"""A front end that served comes back within this time and its own start."""

_STATE_WORDS = {
    GroupState.DOWN: "down",
    GroupState.STARTING: "starting",
    GroupState.READY: "up",
    GroupState.DYING: "down",
    GroupState.STOPPING: "down",
}


class RestartBudget:
    """At most ``max_restarts`` within the window, with growing pauses.

    Deaths that requests may have caused are not counted; each costs a pause of at most
    `_FREE_MAX_DELAY_S`.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._taken: deque[float] = deque()
        self._free: deque[float] = deque()

    def take(self, now: float, *, is_free: bool = False) -> float | None:
        """Seconds to wait before the next restart; None if the budget is used up, or if
        restarts are disabled. A restart with ``is_free`` does not count towards the budget."""
        if is_free and self._policy.max_restarts:
            while self._free and now - self._free[0] > _FREE_WINDOW_S:
                self._free.popleft()
            delay = self._policy.first_delay_s * 2.0 ** min(len(self._free), _MAX_DOUBLINGS)
            self._free.append(now)
            return min(delay, self._policy.max_delay_s, _FREE_MAX_DELAY_S)
        while self._taken and now - self._taken[0] > self._policy.window_s:
            self._taken.popleft()
        if len(self._taken) >= self._policy.max_restarts:
            return None
        delay = self._policy.first_delay_s * 2.0 ** min(len(self._taken), _MAX_DOUBLINGS)
        self._taken.append(now)
        return min(delay, self._policy.max_delay_s)

    def __str__(self) -> str:
        return f"{self._policy.max_restarts} restarts within {self._policy.window_s:g} s"


class GroupTable:
    """The front ends, the orchestrator if one is needed, and the worker groups.

    Groups are added and removed while the server runs; each has a restart budget of its own.
    """

    def __init__(
        self,
        maker: SpecMaker,
        children: Children,
        session_dirs: MpiSessionDirs,
        events: GroupEvents,
        policy: RestartPolicy,
    ) -> None:
        self._maker = maker
        self._children = children
        self._session_dirs = session_dirs
        self._events = events
        self._policy = policy
        self.saved_frontend: dict[str, Any] = {"state": b"", "groups": None}
        """The state that a front end saves for its next incarnation; ``groups``: those it
        uses.
        """

        self.spawn_client = SpawnClient(self._send_to_orchestrator)
        self.frontends = [
            Group(spec, self._starter(spec), events)
            for spec in maker.frontends(self.saved_frontend)
        ]
        self.orchestrator: Group | None = None
        self.workers: dict[str, Group] = {}
        self.configs: dict[str, GroupConfig] = {}
        """Every engine's group, by name; groups of one job share a process group."""

        self._budgets: dict[str, RestartBudget] = {}
        self._failed: set[str] = set()
        self._restart_in_s: dict[str, float] = {}

    def __iter__(self) -> Iterator[Group]:
        """Every group: the front ends, the orchestrator, the workers."""
        yield from self.frontends
        if self.orchestrator is not None:
            yield self.orchestrator
        yield from self.workers.values()

    def add(self, configs: Sequence[GroupConfig]) -> list[Group]:
        """New groups, not yet started; the first spawned one brings the orchestrator."""
        self.configs.update((config.name, config) for config in configs)
        added = []
        sharing = [config for config in configs if config.launch == "prestarted"]
        specs = [self._maker.prestarted(sharing)] if sharing else []
        specs += [self._maker.workers(each) for each in configs if each not in sharing]
        for spec in specs:
            group = self.workers[spec.name] = Group(spec, self._starter(spec), self._events)
            added.append(group)
        if any(config.launch == "spawn" for config in configs) and self.orchestrator is None:
            spec = self._maker.orchestrator()
            self.orchestrator = Group(spec, self._starter(spec), self._events)
            # The orchestrator last: if the orchestrator cannot be started, the waiting groups
            # fail.
            added.append(self.orchestrator)
        return added

    def remove(self, group: Group) -> None:
        """Forget a group without living processes."""
        if group is self.orchestrator:
            self.orchestrator = None
        else:
            del self.workers[group.spec.name]
        for engine in group.spec.engines:
            del self.configs[engine.name]
        tag = group.spec.tag
        self._budgets.pop(tag, None)
        self._failed.discard(tag)
        self._restart_in_s.pop(tag, None)

    def group_of(self, connection: ChildConnection) -> Group | None:
        """The group to which a connected process belongs; None for an unknown group."""
        if connection.hello.role == FRONTEND:
            tag = connection.hello.group
            return next((each for each in self.frontends if each.spec.tag == tag), None)
        if connection.hello.role == ORCHESTRATOR:
            return self.orchestrator
        return self.workers.get(connection.hello.group)

    def holding(self, engine: str) -> Group | None:
        """The process group that runs an engine's group."""
        config = self.configs.get(engine)
        if config is None:
            return None
        name = PRESTARTED if config.launch == "prestarted" else engine
        return self.workers.get(name)

    def budget(self, group: Group) -> RestartBudget:
        """The restarts that a group still has."""
        return self._budgets.setdefault(group.spec.tag, RestartBudget(self._policy))

    def mark_failed(self, group: Group) -> None:
        """Record that a group will not be restarted."""
        self._failed.add(group.spec.tag)

    def has_failed(self, group: Group) -> bool:
        """Whether a group will not be restarted."""
        return group.spec.tag in self._failed

    def note_restart(self, group: Group, delay_s: float) -> None:
        """Record the time of a dead group's restart; 0 after the restart."""
        self._restart_in_s[group.spec.tag] = delay_s

    @property
    def first_frontend(self) -> Group:
        """The front end that holds the state of all models."""
        return self.frontends[0]

    @property
    def is_serving(self) -> bool:
        """Whether every group is up."""
        return all(group.is_serving for group in self)

    def are_down(self, groups: Iterable[Group]) -> bool:
        """Whether no process of these groups lives."""
        return all(group.state is GroupState.DOWN for group in groups)

    # ---- states for the front ends ---------------------------------------------------

    def tell(self, group: Group) -> None:
        """Send the state of a group to the front ends."""
        for arguments in self._states(group):
            for frontend in self.frontends:
                frontend.send(Command(verb="group_state", arguments=arguments))

    def tell_all(self) -> None:
        """Send the state of every group to the front ends."""
        for group in self:
            self.tell(group)

    def _states(self, group: Group) -> list[dict[str, Any]]:
        spec, tag = group.spec, group.spec.tag
        word = _STATE_WORDS[group.state]
        if self.has_failed(group):
            word = "failed"
        elif group.state is GroupState.READY and not group.is_serving:
            word = "down"
        common = {
            "state": word,
            "text": group.fault,
            "fault_time": group.fault_time,
            "num_restarts": max(0, group.incarnation),
            "restart_in_s": self._restart_in_s.get(tag, 0.0),
        }
        ranks = group.describe_ranks()
        if not spec.engines:
            return [
                {
                    **common, "group": spec.title, "model": "", "generation": 1,
                    "world_size": spec.world_size, "start_method": "supervisor",
                    "ranks": ranks,
                }
            ]  # fmt: skip
        return [
            {
                **common, "group": engine.name, "model": engine.model,
                "generation": engine.generation, "world_size": len(engine.ranks),
                "start_method": engine.start_method,
                "ranks": [each for each in ranks if each["rank"] in engine.ranks],
            }
            for engine in spec.engines
        ]  # fmt: skip

    def _starter(self, spec: GroupSpec) -> Starter:
        if spec.is_spawned:
            return SpawnStarter(
                spec, self.spawn_client, self._session_dirs, self._children.log_pipe
            )
        if spec.is_step:
            return StepStarter(spec, self._children, self._session_dirs)
        return CommandStarter(spec, self._children, self._session_dirs)

    def _send_to_orchestrator(self, command: Command) -> None:
        if self.orchestrator is not None:
            self.orchestrator.send(command)
