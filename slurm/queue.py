"""Slurm's own commands: test, submit, watch and signal a job."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trimaran.comm.errors import ConfigError, TrimaranError

_COMMAND_TIMEOUT_S = 60.0
_POLL_S = 0.5
_OVER = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE",
    "BOOT_FAIL", "PREEMPTED",
)  # fmt: skip


class JobError(TrimaranError):
    """A job ended, or did not reach the awaited state in time; or Slurm did not answer."""


def test_only(script: str) -> str:
    """Slurm's forecast of start time and nodes for a script, without a submission.

    Raises:
        ConfigError: Slurm refuses it.
    """
    return _sbatch(script, ["--test-only"]).stderr.strip()


def submit(script: str) -> str:
    """Submit a script; the job's id.

    Raises:
        ConfigError: Slurm refuses it.
    """
    return _sbatch(script, ["--parsable"]).stdout.strip().partition(";")[0]


def state_of(job_id: str) -> str:
    """The job's state in Slurm's words; for an array, the state of its slowest task.

    Raises:
        ConfigError: Slurm has no such job.
    """
    done = _run(["scontrol", "--oneliner", "show", "job", job_id])
    if done.returncode != 0:
        raise ConfigError(f"job {job_id}: {_reason(done)}")
    states = [
        word.partition("=")[2]
        for line in done.stdout.splitlines()
        for word in line.split()
        if word.startswith("JobState=")
    ]
    running = [state for state in states if state not in _OVER]
    failed = [state for state in states if state != "COMPLETED"]
    return (running or failed or states)[0]


def wait_ready(
    job_id: str, folders: Mapping[str, Path], timeout_s: float
) -> dict[str, dict[str, str]]:
    """Wait until every server has written its ready file; their endpoints by name.

    Raises:
        JobError: the job ended first, or the time is over. The job is left as it is.
    """
    deadline = time.monotonic() + timeout_s
    found: dict[str, dict[str, str]] = {}
    while len(found) < len(folders):
        for name in folders.keys() - found.keys():
            # An ending server may remove its file at any moment.
            with contextlib.suppress(FileNotFoundError):
                text = (folders[name] / "ready.json").read_text(encoding="utf-8")
                found[name] = json.loads(text)
        state = state_of(job_id)
        if state in _OVER:
            raise JobError(f"job {job_id} is {state} and never became ready; see its logs")
        if time.monotonic() > deadline:
            raise JobError(
                f"job {job_id} is {state} but {len(folders) - len(found)} of {len(folders)} "
                f"servers were not ready after {timeout_s:g} s (--wait)"
            )
        time.sleep(_POLL_S)
    return {name: found[name] for name in folders}


def drain(job_id: str) -> None:
    """Ask the job's server to drain and end.

    Raises:
        ConfigError: Slurm has no such job, or may not signal the job.
    """
    done = _run(["scancel", "--signal=TERM", "--batch", job_id])
    if done.returncode != 0:
        raise ConfigError(f"job {job_id}: {_reason(done)}")


def wait_over(job_id: str, timeout_s: float) -> str:
    """Wait for the end of a job; its last state.

    Raises:
        JobError: the job runs on.
    """
    deadline = time.monotonic() + timeout_s
    while (state := state_of(job_id)) not in _OVER:
        if time.monotonic() > deadline:
            raise JobError(f"job {job_id} is still {state} after {timeout_s:g} s (--wait)")
        time.sleep(_POLL_S)
    return state


def _sbatch(script: str, flags: Sequence[str]) -> subprocess.CompletedProcess[str]:
    done = _run(["sbatch", *flags], script)
    if done.returncode != 0:
        raise ConfigError(f"sbatch {' '.join(flags)}: {_reason(done)}")
    return done


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def _run(words: Sequence[str], script: str | None = None) -> subprocess.CompletedProcess[str]:
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"{words[0]} is not on PATH: this command needs Slurm's client programs"
        )
    try:
        return subprocess.run(
            list(words), input=script, capture_output=True, text=True,
            errors="surrogateescape", timeout=_COMMAND_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise JobError(f"{words[0]} gave no answer for {_COMMAND_TIMEOUT_S:g} s") from None
