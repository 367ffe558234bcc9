"""A group that is a Slurm step: its command line, and the starter that ends it through srun."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from functools import cache

from trimaran.launcher.config import HostSlots
from trimaran.launcher.starters.children import Children, CommandStarter
from trimaran.launcher.starters.mpi_launch import MPICH, library_version, parse_library
from trimaran.launcher.starters.process_tree import kill_tagged, send, tagged
from trimaran.launcher.starters.run_dir import MpiSessionDirs
from trimaran.launcher.starters.starter import GroupSpec, StarterEvents

# Variables that pass options of the batch script to its steps. A group's step has its own
# options, and each of its ranks sees all GPUs of the job on its node and selects its own.
_JOB_OPTIONS = (
    "SLURM_CPU_BIND", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE",
    "SLURM_DISTRIBUTION", "SLURM_MPI_TYPE", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK",
    "SLURM_EXACT", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK",
    "SLURM_TRES_BIND",
)  # fmt: skip

_SRUN_END_S = 4.0
"""Time for srun to end its step, including stopped ranks, before srun is killed."""

_HELPER_END_S = 3.0
"""Longest life of srun's second process, which ends the step of a dead srun."""


@cache
def plugin() -> str:
    """Slurm's MPI plug-in that joins ranks of the library which mpi4py loads.

    Raises:
        ConfigError: no library is loaded.
    """
    kind, _ = parse_library(library_version())
    return "pmi2" if kind == MPICH else "pmix"


def compose_srun(
    mpi_plugin: str,
    world_size: int,
    command: Sequence[str],
    hosts: Sequence[HostSlots] = (),
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """The command line of a step of ``world_size`` ranks of ``command``.

    The step shares the job's resources with the other groups' steps, and ends when one of its
    ranks dies. Slurm passes the environment to the ranks, except for ``env``, which Slurm would
    set differently: the devices that a rank sees.
    """
    command = [*(["env", *(f"{k}={v}" for k, v in env.items())] if env else []), *command]
    words = [
        "srun", "--overlap", f"--mpi={mpi_plugin}", "--kill-on-bad-exit=1", "--cpu-bind=none",
        "--export=ALL", "--unbuffered", "--input=none", "-n", str(world_size),
    ]  # fmt: skip
    if hosts:
        names = ",".join(host.host for host in hosts)
        most = max(host.num_ranks for host in hosts)
        words += [
            "-N", str(len(hosts)), f"--nodelist={names}", "--distribution=block",
            f"--ntasks-per-node={most}",
        ]  # fmt: skip
    return [*words, *command]


def step_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a group's srun, without the job's settings for steps."""
    return {k: v for k, v in environ.items() if not k.startswith(_JOB_OPTIONS)}


class StepStarter(CommandStarter):
    """An srun, terminated before it is killed: the kill alone would leave the ranks alive."""

    def __init__(
        self, spec: GroupSpec, children: Children, session_dirs: MpiSessionDirs
    ) -> None:
        super().__init__(spec, children, session_dirs)
        self._killed_since: float | None = None

    def start(self, incarnation: int, events: StarterEvents) -> None:
        """See `starters.Starter`."""
        self._killed_since = None
        super().start(incarnation, events)

    def kill(self, *, spare_own: bool = False) -> bool:
        """See `starters.Starter`: terminate the step, and kill an srun that does not end.

        With ``spare_own`` nothing is done: srun itself ends a step that lost a rank.
        """
        left = tagged(os.getpid(), self._spec.tag)
        if spare_own or not left:
            return bool(left)
        now = time.monotonic()
        if self._killed_since is None:
            self._killed_since = now
            send(self.pid, signal.SIGTERM)
        elif now - self._killed_since > _SRUN_END_S + _HELPER_END_S:
            kill_tagged(os.getpid(), self._spec.tag)
        elif now - self._killed_since > _SRUN_END_S and not self.is_over:
            send(self.pid, signal.SIGKILL)
        return True
