"""Random faults: the process, the kind of fault, and the time until the model served again."""

from __future__ import annotations

import contextlib
import http.client
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import psutil
from chaos_server import ChaosServer, Member
from models import Model

from tests.processes import is_alive

KILL, SEGFAULT, STOP = signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP
_POLL_S = 0.05
_SLOW_POLL_S = 0.25
_STABLE_S = 1.0
"""A group that has been up for this time is not about to be detected as lost."""


@dataclass
class Disturbance:
    """One fault: from the signal until every affected model was ready again."""

    kind: str
    models: tuple[str, ...]
    pids: list[int]
    start_s: float
    noticed_s: float = 0.0
    """Seconds until the processes were gone; a stopped one must be killed for that."""
    ready_s: float = 0.0
    """Seconds until every touched model was ready with all its processes."""
    end_s: float = float("inf")


@dataclass(frozen=True)
class Fault:
    """A kind of fault: its victims among a model's processes, and the signal."""

    kind: str
    signal: int
    role: str
    weight: int
    is_for_all: bool = False
    """Every process of this role in the group, else one."""


# Faults of a group, then of all groups of the orchestrator, then of every model.
FAULTS = (
    Fault("kill a rank", KILL, "rank", 8),
    Fault("kill every rank of a group", KILL, "rank", 3, is_for_all=True),
    Fault("stop a rank", STOP, "rank", 3),
    Fault("segfault of a rank", SEGFAULT, "rank", 2),
    Fault("kill mpirun", KILL, "starter", 3),
    Fault("kill an MPI daemon", KILL, "daemon", 2),
    Fault("kill the orchestrator", KILL, "orchestrator", 1),
    Fault("stop the orchestrator", STOP, "orchestrator", 1),
    Fault("kill the front end", KILL, "front end", 1),
)
_GROUP_ROLES = ("rank", "starter")


@dataclass
class Chaos:
    """Injects faults from a thread of its own until `stop`."""

    server: ChaosServer
    models: tuple[Model, ...]
    seed: int = 1
    pause_s: tuple[float, float] = (1.0, 8.0)
    second_share: float = 0.25
    """Share of faults followed by one more on the same group while it starts again."""
    ready_timeout_s: float = 120.0
    kinds: tuple[str, ...] = ()
    """Only these; empty: all that have a victim."""
    disturbances: list[Disturbance] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    on_fault: Callable[[Disturbance], None] = lambda _: None

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Let the last fault heal, then return."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._rng.uniform(*self.pause_s)):
                self.inject()
        except Exception as error:
            self.problems.append(f"the chaos itself failed: {type(error).__name__}: {error}")

    def inject(self, kind: str = "", model: str = "") -> Disturbance | None:
        """One fault, random where not specified, and the wait for the end of its effects."""
        choices = self._choices(kind, model)
        if not choices:
            return None
        weights = [fault.weight for fault, _ in choices]
        fault, victims = self._rng.choices(choices, weights)[0]
        done = Disturbance(
            fault.kind, self._touched(victims), [m.pid for m in victims], time.monotonic()
        )
        self.disturbances.append(done)
        self.on_fault(done)
        _signal(victims, fault.signal)
        second = threading.Timer(
            self._rng.uniform(0.0, 6.0), self._strike_again, [victims[0].group]
        )
        if self._rng.random() < self.second_share:
            second.start()
        self._await_end(done, victims, second)
        return done

    def _choices(self, kind: str, model: str) -> list[tuple[Fault, list[Member]]]:
        """Every fault that has victims now, with the victims that chance picked."""
        found = []
        members = self.server.members()
        for fault in FAULTS:
            if fault.kind != kind if kind else self.kinds and fault.kind not in self.kinds:
                continue
            victims = [
                m for m in members
                if m.role == fault.role and (not model or model_of(m.group) == model)
            ]  # fmt: skip
            if not victims:
                continue
            one = self._rng.choice(victims)
            in_group = [m for m in victims if m.group == one.group]
            found.append((fault, in_group if fault.is_for_all else [one]))
        return found

    def _touched(self, victims: list[Member]) -> tuple[str, ...]:
        """The models that may be affected: the model of a group's process, or all models."""
        if victims[0].role in _GROUP_ROLES:
            return (model_of(victims[0].group),)
        return tuple(model.name for model in self.models)

    def _strike_again(self, group: str) -> None:
        """Kill one more process of the group, in any state of recovery."""
        victims = [
            m for m in self.server.members() if m.group == group and m.role in _GROUP_ROLES
        ]
        if victims:
            _signal([self._rng.choice(victims)], KILL)

    def _await_end(
        self, done: Disturbance, victims: list[Member], second: threading.Timer
    ) -> None:
        deadline = done.start_s + self.ready_timeout_s
        while any(is_alive(m.process) for m in victims) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        done.noticed_s = time.monotonic() - done.start_s
        whole_since_s = 0.0
        while time.monotonic() < deadline:
            if self.server.process.poll() is not None:
                self.problems.append(f"the server ended after: {done.kind} {done.pids}")
                self._stopping.set()
                return
            if second.is_alive() or not self.is_whole(done.models):
                whole_since_s = 0.0
            elif not whole_since_s:
                whole_since_s = time.monotonic()
            elif time.monotonic() - whole_since_s > _STABLE_S:
                done.end_s, done.ready_s = whole_since_s, whole_since_s - done.start_s
                return
            time.sleep(_SLOW_POLL_S)
        self.problems.append(
            f"{', '.join(done.models)}: not ready {self.ready_timeout_s:g} s after: "
            f"{done.kind} {done.pids}"
        )

    def is_whole(self, names: Collection[str]) -> bool:
        """Whether every group of these models is up, with every rank alive."""
        models = [model for model in self.models if model.name in names]
        ranks = Counter(model_of(m.group) for m in self.server.find("rank"))
        if any(ranks[model.name] != model.num_ranks for model in models):
            return False
        try:
            samples = self.server.samples("trimaran_group_up")
        except (OSError, http.client.HTTPException):
            return False
        up = Counter(labels["model"] for labels, value in samples if value)
        return all(up[model.name] == model.num_replicas for model in models)


def model_of(group: str) -> str:
    """The model of a group: ``model#instance@generation``."""
    return group.split("@")[0].split("#")[0]


def _signal(victims: list[Member], number: int) -> None:
    for member in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.process.send_signal(number)
