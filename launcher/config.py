"""The configuration of one server, resolved and checked before any process starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from trimaran.server.config import FrontendConfig
from trimaran.worker.config.engine_config import EngineConfig, ProfileConfig


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """A tokenizer folder, and a model that names it."""

    config_path: Path
    folder: str


@dataclass(frozen=True, slots=True)
class HostSlots:
    """A host and the number of a group's ranks there."""

    host: str
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """One worker group: the ranks that together run one engine."""

    name: str
    model: str
    engine: EngineConfig
    stats_period_ms: int = 100
    instance: int = 0
    """The number of the model's data-parallel replica."""

    generation: int = 1
    """Counts the loads of the model in this server."""

    launch: str = "mpirun"
    """``mpirun``, ``srun``, ``spawn`` (by the orchestrator), ``prestarted`` (a part of one
    job's ranks), ``job`` (the MPI job that this process is a task of) or ``none`` (one plain
    process).
    """

    hosts: tuple[HostSlots, ...] = ()
    """The hosts of the ranks, in order; empty means this host, or the job's own placement."""

    participants: tuple[int, ...] = ()
    """World ranks of a prestarted group."""

    env: dict[str, str] = field(default_factory=dict)
    """Variables of this group's ranks alone, such as CUDA_VISIBLE_DEVICES of a MIG slice."""

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.engine.parallel.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiConfig:
    """How ranks are started."""

    kind: str = "auto"
    """``auto``, ``openmpi`` or ``mpich``: the MPI whose mpirun is used; ``job``: the MPI job
    that this process is a task of; ``none``: one rank without mpirun.
    """

    mpirun: str = ""
    """Path of mpirun; empty means search beside the interpreter, then on PATH."""

    oversubscribe: bool = False
    """Allow more ranks than slots, even where the CPU does not need that."""

    rsh_agent: str = ""
    """The program that starts mpirun's daemons on other hosts; empty means ssh or rsh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often a child that died is started again."""

    max_restarts: int = 3
    """Restarts within ``window_s``; 0 means never. The death of a front end that served does
    not count: clients may have caused it."""

    window_s: float = 600.0
    first_delay_s: float = 0.5
    """Pause before a restart; doubles with each one in the window."""

    max_delay_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """The destinations and the format of log lines."""

    format: str = "text"
    level: str = "INFO"
    file: str = ""
    """Every line goes to this file too; empty means stderr alone."""

    dir: str = ""
    """Folder of one log file a process; empty means none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The resolved configuration of the supervisor."""

    advertise_address: str = ""
    """The address at which ranks of other hosts reach the supervisor; empty without such
    ranks.
    """

    frontend: FrontendConfig
    groups: tuple[GroupConfig, ...]
    """The groups to start with; other groups are added when models are loaded while serving."""

    world_size: int = 0
    """Ranks of the one MPI job that prestarted groups share, with the idle rank 0; 0 without
    such groups."""

    world_hosts: tuple[HostSlots, ...] = ()
    """The hosts of that job's ranks, in order; empty means this host."""

    mpi: MpiConfig = field(default_factory=MpiConfig)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    log: LogConfig = field(default_factory=LogConfig)
    hang_timeout_s: float = 10.0
    stall_timeout_s: float = 60.0
    """A front end that computes may be silent for so long."""

    exit_timeout_s: float = 30.0
    """Longest drain, in seconds."""

    connect_timeout_s: float = 120.0
    """A started process reports to the supervisor within this time."""

    startup_timeout_s: float = 1800.0
    """A connected process is ready within this time."""

    ready_file: str = ""
    """Written with the endpoints once serving, removed at the end; empty means none."""

    profile: ProfileConfig | None = None
    """Steps that every rank traces; None for none."""

    ensemble: str = ""
    """Text-level model of the example request; empty if none is served."""

    tokenizers: tuple[TokenizerFolder, ...] = ()
    """The tokenizers of the models to start with."""

    example_prompt: str = ""
    """Prompt of the example request; empty means a plain question."""

    notes: tuple[str, ...] = ()
    """Settings without effect, and the reason for the way of starting groups, for the log."""

    picture: str = ""
    """The placement of all ranks, as lines of text."""
