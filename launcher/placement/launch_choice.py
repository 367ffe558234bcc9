"""Chooses the way of starting worker groups here, with a reason for the log."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trimaran.comm.errors import ConfigError
from trimaran.launcher.placement.hosts import is_this_host
from trimaran.launcher.placement.job import Job
from trimaran.launcher.placement.placement import Host
from trimaran.launcher.starters.mpi_launch import OPENMPI, Mpi

_FIRST_WITH_ULFM = 5
"""Major version of the first Open MPI whose spawner survives the death of spawned ranks."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The way of starting every group of a server, and the reason."""

    kind: str
    """As in `GroupConfig.launch`."""

    why: str


def choose_launch(
    args: argparse.Namespace,
    job: Job | None,
    hosts: Sequence[Host],
    find_mpi: Callable[[], Mpi],
    environ: Mapping[str, str] = os.environ,
) -> Launch:
    """The way that ``--worker-launch`` requests, or the best that works here.

    ``hosts`` are those that the operator named. ``find_mpi`` is called only if the answer
    depends on the MPI.

    Raises:
        ConfigError: the requested way cannot work here.
    """
    wanted = args.worker_launch
    fixed = _fixed(args, job)
    if fixed is not None:
        if wanted != "auto":
            raise ConfigError(
                f"--worker-launch {wanted} cannot take effect: {fixed.why}. Leave it out."
            )
        return fixed
    site = _LaunchSite(args, hosts, find_mpi, environ)
    if wanted != "auto":
        reason = site.obstacle(wanted)
        if reason:
            raise ConfigError(
                f"--worker-launch {wanted} cannot work here: {reason}. Leave it out, and what "
                "works is chosen."
            )
        return Launch(wanted, "--worker-launch asks for it")
    if not args.multi_model:
        return Launch("mpirun", "leader mode has one group")
    if not site.obstacle("srun"):
        return Launch(
            "srun", f"inside Slurm job {environ['SLURM_JOB_ID']} groups are its steps"
        )
    reason = site.obstacle("spawn")
    if not reason:
        return Launch("spawn", f"{find_mpi()} on one host can spawn groups and outlive them")
    return Launch("mpirun", f"no spawning: {reason}")


def _fixed(args: argparse.Namespace, job: Job | None) -> Launch | None:
    """The way that other flags prescribe; None if they leave a choice."""
    if args.disable_spawn_processes:
        return Launch("prestarted", "--disable-spawn-processes: all ranks are one MPI job")
    if job is not None:
        return Launch("job", "the ranks are the tasks of the MPI job that we run in")
    if args.no_mpi:
        return Launch("none", "--no-mpi: the only rank of a group is a plain process")
    return None


@dataclass(frozen=True, slots=True)
class _LaunchSite:
    """The flags, hosts and MPI that decide which ways work."""

    args: argparse.Namespace
    hosts: Sequence[Host]
    find_mpi: Callable[[], Mpi]
    environ: Mapping[str, str]

    def obstacle(self, kind: str) -> str:
        """The reason why ``spawn``, ``srun`` or ``mpirun`` cannot start groups; empty if it
        can.
        """
        if kind == "spawn":
            return self._no_spawn()
        if kind == "srun":
            return self._no_srun()
        # mpirun's existence is checked by `find_mpi`.
        return ""

    def _no_spawn(self) -> str:
        if not self.args.multi_model:
            return "leader mode (without --multi-model) has no orchestrator"
        far = [host.name for host in self.hosts if not is_this_host(host.name)]
        if far:
            return f"ranks cannot be spawned onto other hosts ({', '.join(far)})"
        if self.environ.get("SLURM_JOB_NUM_NODES", "1") != "1":
            return "ranks cannot be spawned onto other nodes of the Slurm job"
        mpi = self.find_mpi()
        if mpi.kind != OPENMPI or mpi.major < _FIRST_WITH_ULFM:
            return (
                f"with {mpi} a dead rank would take the orchestrator along; Open MPI "
                f"{_FIRST_WITH_ULFM} or newer is needed"
            )
        return ""

    def _no_srun(self) -> str:
        if "SLURM_JOB_ID" not in self.environ:
            return "this is no Slurm job"
        if shutil.which("srun") is None:
            return "srun is not on PATH"
        if self.args.mpirun:
            return "--mpirun names another starter"
        return ""
