"""The choice of the way to start groups, and its refusals."""

from __future__ import annotations

import pytest
from launcher_repository import parse

from trimaran.comm.errors import ConfigError
from trimaran.launcher.placement.job import Job
from trimaran.launcher.placement.launch_choice import choose_launch
from trimaran.launcher.placement.placement import Host
from trimaran.launcher.starters.mpi_launch import MPICH, OPENMPI, Mpi

OPEN_MPI_5 = Mpi("/x/mpirun", OPENMPI, "5.0.11")
OPEN_MPI_4 = Mpi("/x/mpirun", OPENMPI, "4.1.6")
HYDRA = Mpi("/x/mpirun", MPICH, "5.0.2")
FAR = [Host(name="node-of-nobody", num_slots=2)]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The environment of a job on one node, with an srun on PATH."""
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}


def choose(*words, mpi=OPEN_MPI_5, hosts=(), environ=None, job=None):
    return choose_launch(parse(*words), job, hosts, lambda: mpi, environ or {})


def test_leader_mode_is_started_by_mpirun_in_a_slurm_job_too(slurm):
    assert choose().kind == "mpirun"
    assert choose(environ=slurm).kind == "mpirun"
    assert choose("--worker-launch", "srun", environ=slurm).kind == "srun"


def test_orchestrator_mode_spawns_where_spawning_is_safe():
    assert choose("--multi-model").kind == "spawn"
    assert choose("--multi-model", hosts=[Host(name="localhost", num_slots=2)]).kind == "spawn"


@pytest.mark.parametrize(
    ("mpi", "hosts", "why"),
    [
        (OPEN_MPI_4, (), "Open MPI 4.1.6"),
        (HYDRA, (), "MPICH 5.0.2"),
        (OPEN_MPI_5, FAR, "onto other hosts (node-of-nobody)"),
    ],
)
def test_orchestrator_mode_without_spawn_starts_an_mpirun_for_each_group_and_logs_the_reason(
    mpi, hosts, why
):
    launch = choose("--multi-model", mpi=mpi, hosts=hosts)
    assert launch.kind == "mpirun"
    assert why in launch.why
    with pytest.raises(ConfigError, match="--worker-launch spawn cannot work here") as caught:
        choose("--multi-model", "--worker-launch", "spawn", mpi=mpi, hosts=hosts)
    assert why in str(caught.value)


def test_orchestrator_mode_in_a_slurm_job_starts_a_step_for_each_group(slurm):
    launch = choose("--multi-model", environ=slurm)
    assert (launch.kind, launch.why) == ("srun", "inside Slurm job 7 groups are its steps")
    assert choose("--multi-model", "--mpirun", "/x/mpirun", environ=slurm).kind == "spawn"


def test_srun_needs_a_slurm_job_and_its_program(slurm, monkeypatch):
    with pytest.raises(ConfigError, match="this is no Slurm job"):
        choose("--multi-model", "--worker-launch", "srun")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="srun is not on PATH"):
        choose("--multi-model", "--worker-launch", "srun", environ=slurm)


def test_flags_that_require_a_starter_choose_the_starter():
    assert choose("--no-mpi").kind == "none"
    assert choose(job=Job(0, 2, True)).kind == "job"
    flags = ("--multi-model", "--disable-spawn-processes")
    assert choose(*flags).kind == "prestarted"
    assert choose(*flags, job=Job(0, 2, True)).kind == "prestarted"
    with pytest.raises(ConfigError, match="cannot take effect: --no-mpi"):
        choose("--no-mpi", "--worker-launch", "mpirun")
