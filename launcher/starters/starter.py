"""The specification of a group of processes, and the protocol of its starter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trimaran.launcher.starters.mpi_launch import Mpi
from trimaran.server.config import frontend_title

FRONTEND, ORCHESTRATOR, RANK = "frontend", "orchestrator", "rank"
_TITLES = {ORCHESTRATOR: "orchestrator"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine that the processes of a group run, under the front end's name for it."""

    name: str
    """The group that its rank 0 names when it dials the front end."""

    model: str
    generation: int = 1
    start_method: str = ""
    ranks: tuple[int, ...]
    """The ranks of the process group that run the engine, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """The specification of one group of processes."""

    role: str
    """``frontend``, ``orchestrator`` or ``rank``."""

    name: str
    world_size: int
    command: Sequence[str]
    """Starts the whole group (mpirun, srun, the only process itself), or with an
    orchestrator one rank.
    """

    env: Mapping[str, str]
    make_config: Callable[[int, int], dict[str, Any]]
    """From incarnation and rank to the configuration of that process."""

    engines: tuple[EngineSpec, ...] = ()
    mpi: Mpi | None = None
    """The starter, if ``command`` is its mpirun."""

    is_spawned: bool = False
    """The orchestrator starts the ranks."""

    is_step: bool = False
    """``command`` is an srun, and the ranks are not below it."""

    inherit_fds: bool = False
    """The process reaches the outer MPI job through descriptors of this process."""

    connect_timeout_s: float
    startup_timeout_s: float
    hang_timeout_s: float
    """The silence after which a ready process counts as hung; 0 means never."""

    stall_timeout_s: float = 0.0
    """The same for a front end that computes meanwhile; 0 for other processes."""

    @property
    def title(self) -> str:
        """The group in log lines."""
        if self.role == FRONTEND:
            return frontend_title(int(self.name.partition("-")[2] or 0))
        return _TITLES.get(self.role, f"group {self.name}")

    @property
    def tag(self) -> str:
        """The value of TRIMARAN_GROUP for the group's processes, unique among groups."""
        return group_tag(self.role, self.name)


def group_tag(role: str, name: str) -> str:
    """The value of TRIMARAN_GROUP in the environment of a group's processes."""
    if role == RANK:
        return name
    return f":{name}" if role == FRONTEND else f":{role}"


def frontend_name(index: int) -> str:
    """The name of a front end's group; the first one is the only one by default."""
    return f"{FRONTEND}-{index}" if index else FRONTEND


@dataclass(frozen=True, slots=True)
class StarterEvents:
    """The callbacks of a starter. Never called from within `Starter.start`."""

    on_exit: Callable[[], None]
    """The starter's own process has ended; `Starter.status` has the result."""

    on_failure: Callable[[str], None]
    """The processes could not be started, or one of them died; the text names which."""

    on_starter_lost: Callable[[str], None]
    """The process that started them died, and they die with it; it is started again."""


class Starter(Protocol):
    """Starts all processes of a group, and kills them."""

    @property
    def pid(self) -> int:
        """The starter's own process below this one, from start to end; 0 if it has none."""

    @property
    def status(self) -> int | None:
        """The wait status of the starter's own process; None while it runs or if there is
        none.
        """

    @property
    def is_over(self) -> bool:
        """Whether no process of the starter itself is left to wait for."""

    @property
    def title(self) -> str:
        """The starter in log lines."""

    def start(self, incarnation: int, events: StarterEvents) -> None:
        """Start the next incarnation of the group.

        Raises:
            OSError: the program cannot be started.
        """

    def kill(self, *, spare_own: bool = False) -> bool:
        """Kill the group's current processes; whether there were any.

        Called again until it returns False.

        Ranks on other hosts are out of reach: they end as their connections close. With
        ``spare_own`` the starter's own process lives on, to report how the first rank died.
        """

    def release(self) -> None:
        """Forget the incarnation that was started last."""
