"""The command line and the environment of a group's Slurm step."""

from __future__ import annotations

from trimaran.launcher.config import HostSlots
from trimaran.launcher.starters.slurm_step import compose_srun, step_env


def test_a_step_shares_the_job_and_ends_with_its_first_rank():
    words = compose_srun("pmix", 2, ["rank"])
    assert words[0] == "srun" and words[-3:] == ["-n", "2", "rank"]
    assert {"--overlap", "--mpi=pmix", "--kill-on-bad-exit=1"} <= set(words)
    assert not any(word.startswith("--nodelist") for word in words)


def test_a_step_is_put_on_the_hosts_of_its_group():
    words = compose_srun("pmi2", 4, ["rank"], (HostSlots("n2", 2), HostSlots("n3", 2)))
    assert {"--nodelist=n2,n3", "--ntasks-per-node=2", "--mpi=pmi2"} <= set(words)
    assert words[words.index("-N") + 1] == "2"


def test_devices_of_a_group_are_set_where_slurm_does_not_replace_them():
    words = compose_srun("pmix", 1, ["rank"], env={"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert words[-3:] == ["env", "CUDA_VISIBLE_DEVICES=MIG-1", "rank"]


def test_what_the_batch_script_asked_of_tasks_does_not_bind_the_steps_of_groups():
    environ = {
        "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_CPU_BIND": "cores", "SLURM_GPUS_PER_TASK": "1", "PATH": "/bin",
    }  # fmt: skip
    assert step_env(environ) == {"SLURM_JOB_ID": "7", "PATH": "/bin"}
