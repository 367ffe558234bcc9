"""A job's state and its servers' ready files, beside a Slurm that is a script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimaran.slurm import queue


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Write what scontrol says of a job, one line a task."""
    program, said = tmp_path / "scontrol", tmp_path / "said"
    program.write_text(f"#!/bin/sh\ncat {said}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(queue, "_POLL_S", 0.01)

    def says(*states: str) -> None:
        said.write_text("".join(f"JobId=7 JobState={state} Reason=None\n" for state in states))

    return says


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (["PENDING"], "PENDING"),
        (["COMPLETED", "RUNNING"], "RUNNING"),
        (["COMPLETED", "FAILED"], "FAILED"),
        (["COMPLETED", "COMPLETED"], "COMPLETED"),
        (["PREEMPTED", "COMPLETED"], "PREEMPTED"),
    ],
)
def test_the_state_of_a_job_array_is_that_of_its_slowest_task(job, states, state):
    job(*states)

    assert queue.state_of("7") == state


@pytest.mark.parametrize("state", ["PREEMPTED", "CANCELLED", "OUT_OF_MEMORY"])
def test_waiting_for_an_ended_job_fails_at_once(job, tmp_path, state):
    job(state)

    with pytest.raises(queue.JobError, match=f"job 7 is {state} and never became ready"):
        queue.wait_ready("7", {"7": tmp_path}, 5.0)
    assert queue.wait_over("7", 5.0) == state


def test_waiting_lasts_until_every_server_has_endpoints(job, tmp_path):
    job("RUNNING")
    folders = {name: tmp_path / name for name in ("7_0", "7_1")}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "ready.json").write_text(json.dumps({"http": name}))

    found = queue.wait_ready("7", folders, 5.0)
    (folders["7_1"] / "ready.json").unlink()

    assert found == {name: {"http": name} for name in folders}
    with pytest.raises(queue.JobError, match=r"1 of 2 servers were not ready after 0\.1 s"):
        queue.wait_ready("7", folders, 0.1)


def test_a_ready_file_deleted_during_the_read_counts_as_absent(job, tmp_path, monkeypatch):
    job("RUNNING")
    read_text = Path.read_text
    file = tmp_path / "ready.json"
    file.write_text("{}")

    def ended_meanwhile(path, **options):
        path.unlink(missing_ok=True)
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", ended_meanwhile)

    with pytest.raises(queue.JobError, match="1 of 1 servers were not ready"):
        queue.wait_ready("7", {"7": tmp_path}, 0.1)
