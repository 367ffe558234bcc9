"""Whole MPI jobs: their ends and their refusals to start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trimaran.comm.deadlines import wait_for

ROOT_OK = {
    f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1"
    for prefix in ("OMPI", "PRTE")
    for suffix in ("", "_CONFIRM")
}
DISCOVER = """
import sys
from trimaran.comm import mpi
from trimaran.comm.errors import ConfigError
try:
    world = mpi.World.discover()
except ConfigError as error:
    sys.exit(str(error))
print(world.size)
mpi.finalize()
"""
ABORT = """
import sys, time
from trimaran.comm import mpi
world = mpi.World.discover()
print("up", flush=True)
world.barrier(90.0, "start")
if world.rank == 1:
    mpi.abort(7)
time.sleep(120)
"""
STOPPED = """
import os, signal, torch
from trimaran.comm import mpi
from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.errors import PeerLostError
world = mpi.World.discover()
group = connect_group(world, torch.device("cpu"), timeout_s=3.0)
world.barrier(90.0, "start")
if world.rank == 1:
    print(os.getpid(), flush=True)
try:
    while True:
        group.all_reduce(torch.ones(4))
except PeerLostError as error:
    print(error, flush=True)
    mpi.abort(9)
"""


def environment(**extra: str) -> dict[str, str]:
    ours = {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_btl": "^ofi"}
    return {**os.environ, **ROOT_OK, **ours, **extra}


def mpirun(code: str, num_ranks: int) -> subprocess.Popen:
    starter = Path(sys.executable).with_name("mpirun")
    return subprocess.Popen(
        [str(starter), "--oversubscribe", "--bind-to", "none", "-n", str(num_ranks),
         sys.executable, "-P", "-c", code],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def run_alone(**extra: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-P", "-c", DISCOVER],
        env=environment(**extra),
        capture_output=True,
        text=True,
    )


def test_a_single_rank_is_a_world_of_size_one():
    done = run_alone()

    assert (done.returncode, done.stdout.strip()) == (0, "1")


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_singletons_of_a_larger_job_are_refused_with_the_remedy(name):
    # PMI_SIZE and the like alone do not make the library look for a starter.
    done = run_alone(**{name: "4"})

    assert done.returncode == 1
    assert f"world has 1 rank(s) but {name} is 4" in done.stderr
    assert "--mpi=pmix" in done.stderr


@pytest.mark.parametrize("transports", ["", "^ofi", "self,tcp"])
def test_a_single_rank_leaves_no_shared_memory_segment(tmp_path, transports):
    folder = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path), "OMPI_MCA_btl": transports}

    done = run_alone(**folder)

    assert (done.returncode, done.stdout.strip()) == (0, "1")
    assert list(tmp_path.iterdir()) == []


def test_a_single_rank_opens_no_slow_mpi_transport():
    done = run_alone(OMPI_MCA_btl="", OMPI_MCA_btl_base_verbose="100")

    assert "component tcp open" in done.stderr
    assert "component ofi open" not in done.stderr


def test_task_counts_of_the_starter_override_those_of_slurm():
    done = run_alone(OMPI_COMM_WORLD_SIZE="1", SLURM_STEP_NUM_TASKS="8")

    assert done.returncode == 0


def test_an_abort_of_a_rank_ends_all_ranks():
    job = mpirun(ABORT, 3)

    output, _ = job.communicate(timeout=100)

    assert output.count("up\n") == 3
    assert job.returncode == 7


def test_a_stopped_rank_is_named_and_the_job_ends():
    job = mpirun(STOPPED, 2)
    pid = int(job.stdout.readline())

    os.kill(pid, signal.SIGSTOP)
    output, _ = job.communicate(timeout=100)

    assert "rank(s) [1] did not reach" in output
    assert "within 3 s" in output
    assert job.returncode != 0
    assert wait_for(lambda: not Path(f"/proc/{pid}").exists(), 60.0)
