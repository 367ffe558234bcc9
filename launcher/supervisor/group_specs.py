"""Makes the `GroupSpec` of every group: its command, environment and configurations."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.comm.env import INCARNATION, ChildEnv
from trimaran.comm.errors import ConfigError
from trimaran.launcher.config import GroupConfig, HostSlots, ServeConfig
from trimaran.launcher.placement.job import rank_environ
from trimaran.launcher.starters.mpi_launch import (
    MPICH,
    Mpi,
    compose,
    mpi_settings,
    num_slots,
    starter_env,
)
from trimaran.launcher.starters.run_dir import MpiSessionDirs
from trimaran.launcher.starters.slurm_step import compose_srun, plugin, step_env
from trimaran.launcher.starters.starter import (
    FRONTEND,
    ORCHESTRATOR,
    RANK,
    EngineSpec,
    GroupSpec,
    frontend_name,
    group_tag,
)
from trimaran.worker.config.engine_config import RankConfig

PRESTARTED = "ranks"
"""Name of the one group that holds all prestarted ranks."""

MPIRUN_LAUNCHES = ("mpirun", "prestarted")


@dataclass(frozen=True, slots=True)
class Programs:
    """The commands of the front end, of a rank and of the orchestrator."""

    frontend: tuple[str, ...]
    rank: tuple[str, ...]
    orchestrator: tuple[str, ...] = ()

    @classmethod
    def installed(cls) -> Programs:
        """The console scripts beside this interpreter.

        Raises:
            ConfigError: the package is not installed there.
        """
        names = ("trimaran-frontend", "trimaran-rank", "trimaran-orchestrator")
        frontend, rank, orchestrator = ((_script(name),) for name in names)
        return cls(frontend, rank, orchestrator)


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of the supervisor and the front ends for children of this host and of other
    hosts.
    """

    token: str
    supervisor: str
    frontends: tuple[str, ...]
    far_supervisor: str = ""
    """Over TCP, on the advertised address alone; empty if all processes run on this host."""

    far_frontends: tuple[str, ...] = ()
    """One address for each front end; may be empty."""

    between_frontends: str = ""
    """The address at which the first front end expects the others."""

    def engine_listen(self, index: int) -> tuple[str, ...]:
        """The addresses at which a front end expects engines."""
        return (self.frontends[index], *self.far_frontends[index : index + 1])


class SpecMaker:
    """Makes the specifications of all groups of one server."""

    def __init__(
        self,
        config: ServeConfig,
        mpi: Mpi | None,
        programs: Programs,
        addresses: Addresses,
        session_dirs: MpiSessionDirs,
    ) -> None:
        self._config = config
        self._mpi = mpi
        self._programs = programs
        self._addresses = addresses
        self._session_dirs = session_dirs

    def frontends(self, saved: Mapping[str, Any]) -> list[GroupSpec]:
        """All front ends; every incarnation of the first one gets ``saved["state"]``."""
        count = self._config.frontend.num_frontends
        return [self._frontend(index, saved) for index in range(count)]

    def _frontend(self, index: int, saved: Mapping[str, Any]) -> GroupSpec:
        name = frontend_name(index)
        env = {
            **starter_env(os.environ),
            **self._child_env(FRONTEND, name),
            # The front end forks only to run other programs: tokenizer threads stay enabled,
            # and gRPC's fork handlers, which log a line each time, are disabled.
            "TOKENIZERS_PARALLELISM": "false",
            "GRPC_ENABLE_FORK_SUPPORT": "0",
        }
        config = dataclasses.replace(
            self._config.frontend,
            index=index,
            engine_listen=self._addresses.engine_listen(index),
            first_frontend=self._addresses.between_frontends,
            token=self._addresses.token,
        )
        wire = config.to_wire()

        def make_config(incarnation: int, rank: int) -> dict[str, Any]:
            return {**wire, "saved_state": saved["state"] if index == 0 else b""}

        return self._spec(FRONTEND, name, self._programs.frontend, env, make_config)

    def orchestrator(self) -> GroupSpec:
        """The specification of the process that spawns groups."""
        env = {
            **starter_env(os.environ),
            **self._child_env(ORCHESTRATOR, ""),
            **mpi_settings(),
            **self._session_dirs.env(group_tag(ORCHESTRATOR, ""), is_here_alone=True),
            **self._session_dirs.loopback_env(),
        }

        def make_config(incarnation: int, rank: int) -> dict[str, Any]:
            return {"hang_timeout_s": self._config.hang_timeout_s}

        programs = self._programs.orchestrator
        return self._spec(ORCHESTRATOR, ORCHESTRATOR, programs, env, make_config)

    def workers(self, group: GroupConfig) -> GroupSpec:
        """One engine's ranks, started for this engine alone."""
        is_job = group.launch == "job"
        ours = {**self._rank_env(group, group.name, bool(group.hosts)), **group.env}
        base = rank_environ(os.environ) if is_job else starter_env(os.environ)
        if group.launch == "srun":
            base = step_env(base)
        files = self._session_env(group.launch, group.name, group.hosts)
        # A spawned rank inherits the other variables from the orchestrator.
        env = {**files, **ours} if group.launch == "spawn" else {**base, **files, **ours}

        def make_config(incarnation: int, rank: int) -> dict[str, Any]:
            return self._rank_config(group, incarnation).to_wire()

        return self._spec(
            RANK,
            group.name,
            self._command(group, sorted(ours)),
            env,
            make_config,
            engines=(self._engine(group, range(group.world_size)),),
            world_size=group.world_size,
            launch=group.launch,
        )

    def prestarted(self, groups: Sequence[GroupConfig]) -> GroupSpec:
        """All ranks of one job; each engine uses its configured ranks.

        Rank 0 runs no engine: Triton's TensorRT-LLM backend has its orchestrator there, and
        ``participant_ids`` mean the same ranks.
        """
        hosts, world_size = self._config.world_hosts, self._config.world_size
        ours = self._rank_env(groups[0], PRESTARTED, bool(hosts))
        if self._config.mpi.kind == "job":
            launch, command = "job", list(self._programs.rank)
            base = rank_environ(os.environ)
        else:
            launch, command = "prestarted", self._mpirun(world_size, sorted(ours), hosts)
            base = starter_env(os.environ)
        files = self._session_env(launch, PRESTARTED, hosts)
        owner = {rank: group for group in groups for rank in group.participants}

        def make_config(incarnation: int, rank: int) -> dict[str, Any]:
            group = owner.get(rank)
            # A rank without an engine gets the configuration of some engine, and stays idle.
            return self._rank_config(group or groups[0], incarnation).to_wire()

        return self._spec(
            RANK,
            PRESTARTED,
            command,
            {**base, **files, **ours},
            make_config,
            engines=tuple(self._engine(group, group.participants) for group in groups),
            world_size=world_size,
            launch=launch,
        )

    # ---- parts --------------------------------------------------------------------------

    def _spec(
        self,
        role: str,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        make_config: Any,
        *,
        engines: tuple[EngineSpec, ...] = (),
        world_size: int = 1,
        launch: str = "",
    ) -> GroupSpec:
        config = self._config
        return GroupSpec(
            role=role,
            name=name,
            world_size=world_size,
            command=command,
            env=env,
            make_config=make_config,
            engines=engines,
            mpi=self._mpi if launch in MPIRUN_LAUNCHES else None,
            is_spawned=launch == "spawn",
            is_step=launch == "srun",
            inherit_fds=launch == "job",
            connect_timeout_s=config.connect_timeout_s,
            startup_timeout_s=config.startup_timeout_s,
            hang_timeout_s=config.hang_timeout_s,
            stall_timeout_s=config.stall_timeout_s if role == FRONTEND else 0.0,
        )

    def _engine(self, group: GroupConfig, ranks: Iterable[int]) -> EngineSpec:
        return EngineSpec(
            name=group.name,
            model=group.model,
            generation=group.generation,
            start_method=self._start_method(group),
            ranks=tuple(ranks),
        )

    def _command(self, group: GroupConfig, forward: Sequence[str]) -> list[str]:
        program = list(self._programs.rank)
        if group.launch == "mpirun":
            return self._mpirun(group.world_size, forward, group.hosts)
        if group.launch == "srun":
            return compose_srun(plugin(), group.world_size, program, group.hosts, group.env)
        return program

    def _mpirun(
        self, world_size: int, forward: Sequence[str], hosts: tuple[HostSlots, ...]
    ) -> list[str]:
        assert self._mpi is not None
        return compose(
            self._mpi,
            world_size,
            list(self._programs.rank),
            forward=[*forward, INCARNATION],
            oversubscribe=self._needs_oversubscribe(world_size),
            hosts=hosts,
            rsh_agent=self._config.mpi.rsh_agent,
        )

    def _rank_config(self, group: GroupConfig, incarnation: int) -> RankConfig:
        addresses = self._addresses
        # Rank 0 of a leader group under mpirun is on this host, also in a job of several hosts.
        is_elsewhere = group.hosts or group.participants or group.launch == "srun"
        is_far = bool(addresses.far_frontends and is_elsewhere)
        return RankConfig(
            engine=group.engine,
            group=group.name,
            incarnation=incarnation,
            frontends=addresses.far_frontends if is_far else addresses.frontends,
            start_method=self._start_method(group),
            participants=group.participants,
            hang_timeout_s=self._config.hang_timeout_s,
            start_timeout_s=self._config.startup_timeout_s,
            stats_period_ms=group.stats_period_ms,
            profile=self._config.profile,
        )

    def _start_method(self, group: GroupConfig) -> str:
        return "singleton" if group.launch == "none" else group.launch

    def _rank_env(self, group: GroupConfig, name: str, is_far: bool) -> dict[str, str]:
        address = self._addresses.far_supervisor if is_far else ""
        # Ranks that a job has put on other hosts get the address from rank 0.
        if not address and self._config.advertise_address:
            address = self._addresses.far_supervisor
        return {
            **self._child_env(RANK, name, address),
            "OMP_NUM_THREADS": str(group.engine.num_threads),
        }

    def _session_env(self, launch: str, name: str, hosts: Any) -> dict[str, str]:
        """The session directories of the MPI that starts a group; none in an outer job."""
        if launch not in ("mpirun", "prestarted", "spawn", "none"):
            return {}
        # Without --host, mpirun uses all nodes of the allocation that it runs in.
        is_alone = not hosts and os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1"
        env = self._session_dirs.env(group_tag(RANK, name), is_here_alone=is_alone)
        is_hydra = self._mpi is not None and self._mpi.kind == MPICH
        if is_alone and not is_hydra:
            # Hydra's processes reach each other by the host's name, also on one host.
            env.update(self._session_dirs.loopback_env())
        return env

    def _child_env(self, role: str, name: str, address: str = "") -> dict[str, str]:
        child = ChildEnv(
            supervisor=address or self._addresses.supervisor,
            token=self._addresses.token,
            group=group_tag(role, name),
            log_format=self._config.log.format,
            log_level=self._config.log.level,
            log_dir=self._config.log.dir,
        )
        return {**child.to_environ(), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}

    def _needs_oversubscribe(self, world_size: int) -> bool:
        if self._config.mpi.oversubscribe:
            return True
        # Slurm counts the slots of an allocation, whose hosts are unknown here.
        return "SLURM_JOB_ID" not in os.environ and world_size > num_slots()


def _script(name: str) -> str:
    path = shutil.which(name, path=sysconfig.get_path("scripts"))
    if path is None:
        raise ConfigError(
            f"the program {name} is not installed beside this Python. Install the package: "
            "pip install -e ."
        )
    return path
