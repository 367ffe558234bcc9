"""Which task of which MPI job this process is, by its starter's variables."""

from __future__ import annotations

import ipaddress

import pytest
from launcher_repository import resolve, write_engine, write_model

from trimaran.comm.errors import ConfigError
from trimaran.launcher.placement import job
from trimaran.launcher.placement.job import Job, current_job


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            Job(1, 2, True),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            Job(0, 4, False),
        ),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, Job(3, 4, True)),
        (
            {"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0",
             "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
            Job(1, 2, False),
        ),
        (
            {"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0",
             "SLURM_STEP_TASKS_PER_NODE": "2"},
            Job(1, 2, True),
        ),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, None),
    ],
)  # fmt: skip
def test_a_task_reads_its_rank_and_world_size(environ, expected):
    assert current_job(environ) == expected


def test_tasks_without_a_common_mpi_world_are_refused():
    with pytest.raises(ConfigError, match=r"2 tasks that no MPI joins.*--mpi=pmix"):
        current_job({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"})


def test_a_rank_of_a_job_keeps_the_jobs_variables_and_gets_other_settings_from_rank_0():
    environ = job.rank_environ({"PMIX_RANK": "1", "OMPI_MCA_mpi_yield_when_idle": "0"})
    assert environ["PMIX_RANK"] == "1"
    assert environ["OMPI_MCA_mpi_yield_when_idle"] == "0"
    assert environ["TRIMARAN_JOB"] == "1"


def test_the_address_for_other_hosts_is_never_loopback():
    assert not ipaddress.ip_address(job.own_address()).is_loopback


def test_an_existing_mpi_job_fixes_the_starter_and_disables_restarts(tmp_path):
    engine = write_engine(tmp_path / "engine", tp_size=2)
    write_model(tmp_path / "repo" / "m", gpt_model_path=str(engine))
    repository = tmp_path / "repo"
    config = resolve(repository, job=Job(0, 2, True))
    assert (config.mpi.kind, config.restart.max_restarts) == ("job", 0)
    assert config.advertise_address == ""
    assert resolve(repository, job=Job(0, 2, False)).advertise_address != ""
    with pytest.raises(ConfigError, match=r"this MPI job has 3 tasks but .* runs on 2 ranks"):
        resolve(repository, job=Job(0, 3, True))
    assert resolve(tmp_path / "repo").restart.max_restarts == 3
