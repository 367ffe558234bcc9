"""Groups that the orchestrator spawns: commands to the orchestrator, and its events."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from trimaran.comm.env import INCARNATION, LOG_PIPE
from trimaran.comm.messages.messages import Command
from trimaran.launcher.starters.process_tree import kill_tagged
from trimaran.launcher.starters.process_watch import RankWatch
from trimaran.launcher.starters.run_dir import MpiSessionDirs
from trimaran.launcher.starters.starter import GroupSpec, StarterEvents


class SpawnClient:
    """The starters' client of the orchestrator: sends commands, dispatches its events."""

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._is_up = False
        self._waiting: list[Command] = []
        self._started: dict[tuple[str, int], StarterEvents] = {}

    def start(self, command: Command, events: StarterEvents) -> None:
        """Request the spawn of a group: now, or as soon as the orchestrator is up."""
        self._started[_key(command.arguments)] = events
        if self._is_up:
            self._send(command)
        else:
            self._waiting.append(command)

    def release(self, group: str, incarnation: int) -> None:
        """Forget this incarnation of a group."""
        if self._started.pop((group, incarnation), None) is None:
            return
        key = (group, incarnation)
        self._waiting = [each for each in self._waiting if _key(each.arguments) != key]
        if self._is_up:
            arguments = {"group": group, "incarnation": incarnation}
            self._send(Command(verb="forget", arguments=arguments))

    def on_up(self) -> None:
        """The orchestrator is ready."""
        self._is_up = True
        waiting, self._waiting = self._waiting, []
        for command in waiting:
            self._send(command)

    def on_down(self) -> None:
        """The orchestrator died, and the groups that it spawned die with it."""
        was_up, self._is_up = self._is_up, False
        if not was_up:
            return
        waiting = {_key(each.arguments) for each in self._waiting}
        for key, events in list(self._started.items()):
            if key not in waiting:
                events.on_starter_lost("its orchestrator died")

    def give_up(self, why: str) -> None:
        """The orchestrator never started: fail every group that waits for it."""
        for events in list(self._started.values()):
            events.on_failure(why)

    def on_event(self, facts: Mapping[str, Any]) -> None:
        """An event of the orchestrator about a group."""
        events = self._started.get(_key(facts))
        if events is None:
            return
        if facts["event"] == "spawn_failed":
            events.on_failure(f"MPI_Comm_spawn failed: {facts.get('text', '')}")


class SpawnStarter:
    """Starts a group through the orchestrator; has no process of its own."""

    pid = 0
    status: int | None = None
    is_over = True

    def __init__(
        self, spec: GroupSpec, client: SpawnClient, session_dirs: MpiSessionDirs, log_pipe: str
    ) -> None:
        self._spec = spec
        self._log_pipe = log_pipe
        self._session_dirs = session_dirs
        self._client = client
        self._incarnation = -1
        self._watch: RankWatch | None = None

    @property
    def title(self) -> str:
        """See `starters.Starter`."""
        size = self._spec.world_size
        return f"{size} rank{'s' if size > 1 else ''} by MPI_Comm_spawn"

    def start(self, incarnation: int, events: StarterEvents) -> None:
        """See `starters.Starter`."""
        self._incarnation = incarnation
        spec = self._spec
        self._session_dirs.prepare(spec.tag)
        arguments = {
            "group": spec.name,
            "incarnation": incarnation,
            "world_size": spec.world_size,
            "command": list(spec.command),
            # MPI's daemon drops the output of spawned processes, so they get the log pipe.
            "env": {**spec.env, INCARNATION: str(incarnation), LOG_PIPE: self._log_pipe},
        }
        self._watch = RankWatch(spec.tag, incarnation, spec.world_size, events.on_failure)
        self._client.start(Command(verb="spawn", arguments=arguments), events)

    def kill(self, *, spare_own: bool = False) -> bool:
        """See `starters.Starter`."""
        return bool(kill_tagged(os.getpid(), self._spec.tag))

    def release(self) -> None:
        """See `starters.Starter`."""
        if self._watch is not None:
            self._watch.close()
        self._client.release(self._spec.name, self._incarnation)
        self._session_dirs.clear(self._spec.tag)


def _key(facts: Mapping[str, Any]) -> tuple[str, int]:
    return str(facts["group"]), int(facts["incarnation"])
