"""Composes the Slurm step that starts the ranks of one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from trimaran.launcher.config import HostSlots
from trimaran.launcher.starters.mpi_launch import MPICH, library_version, parse_library

# What the batch script's own options left for steps: a group's step has options of its own,
# and each of its ranks sees all GPUs of the job on its node, to take those that it is told.
_JOB_OPTIONS = (
    "SLURM_CPU_BIND", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE",
    "SLURM_DISTRIBUTION", "SLURM_MPI_TYPE", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK",
    "SLURM_EXACT", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK",
    "SLURM_TRES_BIND",
)  # fmt: skip


@cache
def plugin() -> str:
    """Slurm's MPI plug-in that joins ranks of the library which mpi4py loads.

    Raises:
        ConfigError: it loads none.
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

    The step shares what the job has with the other groups' steps, and ends when one of its
    ranks dies. Variables reach the ranks as Slurm passes them on by itself, but for those
    of ``env``, which Slurm would set otherwise: the devices that a rank sees.
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
    """The environment of a group's srun, without what the job says for other steps."""
    return {k: v for k, v in environ.items() if not k.startswith(_JOB_OPTIONS)}
