"""Serving inside an MPI job that was started from outside: its tasks become ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from trimaran.comm.env import JOB
from trimaran.comm.errors import ConfigError
from trimaran.launcher.starters.mpi_launch import TRANSPORTS

_ABORT_TIMEOUT_S = 60.0
_ABORT = "from mpi4py import MPI; MPI.COMM_WORLD.Abort(2)"
_RANK_VARIABLES = (
    # rank, size, ranks of this host
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)


@dataclass(frozen=True, slots=True)
class Job:
    """This process's place in an MPI job."""

    rank: int
    size: int
    is_one_host: bool


def current_job(environ: Mapping[str, str]) -> Job | None:
    """The job that this process is a task of; None outside of a job, or in a job of one task.

    Raises:
        ConfigError: a Slurm step of several tasks that no MPI joins.
    """
    for rank_name, size_name, local_name in _RANK_VARIABLES:
        if rank_name in environ and size_name in environ:
            size = int(environ[size_name])
            is_one_host = environ.get(local_name) == str(size)
            return Job(int(environ[rank_name]), size, is_one_host) if size > 1 else None
    if "SLURM_STEP_ID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        raise ConfigError(
            f"this Slurm step has {environ['SLURM_STEP_NUM_TASKS']} tasks that no MPI joins. "
            "Start it with srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH), or with one task."
        )
    return None


def rank_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank inside the job; the other settings come from rank 0."""
    ours = {"OMPI_MCA_mpi_yield_when_idle": "1", **TRANSPORTS}
    return {**ours, **environ, JOB: "1", "PYTHONSAFEPATH": "1"}


def become_rank(command: tuple[str, ...]) -> NoReturn:
    """Turn this task into a rank of the group that task 0 supervises."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), rank_environ(os.environ))


def abort_job() -> None:
    """End the other tasks, which wait in MPI for rank 0."""
    try:
        subprocess.run(
            [sys.executable, "-c", _ABORT],
            env=rank_environ(os.environ),
            close_fds=False,
            timeout=_ABORT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        pass  # the job's starter has its own means


def own_address() -> str:
    """An address of this host that other hosts can reach.

    Raises:
        ConfigError: no address is found.
    """
    try:
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    except OSError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends no packet: the kernel only chooses the route
            return str(sock.getsockname()[0])
        except OSError:
            raise ConfigError(
                "this host has no address that other hosts could reach. Name one with "
                "--advertise-address ADDR."
            ) from None
