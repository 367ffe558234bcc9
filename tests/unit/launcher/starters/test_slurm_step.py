"""The command line and the environment of a group's Slurm step."""

from __future__ import annotations

from trimaran.launcher.config import HostSlots
from trimaran.launcher.starters.slurm_step import compose_srun, step_env


def test_a_step_shares_the_job_and_ends_with_its_first_rank():
    words = compose_srun("pmix", 2, ["rank"])
    assert words[0] == "srun" and words[-3:] == ["-n", "2", "rank"]
    assert {"--overlap", "--mpi=pmix", "--kill-on-bad-exit=1"} <= set(words)
    assert not any(word.startswith("--nodelist") for word in words)


def test_a_step_runs_on_the_hosts_of_its_group():
    words = compose_srun("pmi2", 4, ["rank"], (HostSlots("n2", 2), HostSlots("n3", 2)))
    assert {"--nodelist=n2,n3", "--ntasks-per-node=2", "--mpi=pmi2"} <= set(words)
    assert words[words.index("-N") + 1] == "2"


def test_devices_of_a_group_survive_the_environment_of_slurm():
    words = compose_srun("pmix", 1, ["rank"], env={"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert words[-3:] == ["env", "CUDA_VISIBLE_DEVICES=MIG-1", "rank"]


def test_task_options_of_the_batch_script_do_not_limit_steps_of_groups():
    environ = {
        "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_CPU_BIND": "cores", "SLURM_GPUS_PER_TASK": "1", "PATH": "/bin",
    }  # fmt: skip
    assert step_env(environ) == {"SLURM_JOB_ID": "7", "PATH": "/bin"}
