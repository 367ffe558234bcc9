"""`benchmarks/tables.py`: jobs side by side on the GPUs of a host."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import is_alive

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "tables.py"
TELL = "import os, sys; open(sys.argv[2], 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
SLEEP = "import time; time.sleep(99)"


@pytest.fixture
def tables():
    return runpy.run_path(str(SCRIPT))


def job_of(tables, num_gpus, code):
    return tables["Job"](num_gpus, (sys.executable, "-c", code), "--json")


def run(tables, tmp_path, jobs, num_gpus, seconds=60.0):
    tables["JOBS"].clear()
    tables["JOBS"].update(jobs)
    host = tables["Host"](num_gpus, tmp_path)
    host.run(list(jobs), seconds)
    return host.failed


def test_jobs_have_separate_gpus_and_a_large_job_all_gpus(tables, tmp_path):
    wait = f"{TELL}; import time; time.sleep(1)"
    jobs = {
        "first": job_of(tables, 1, wait), "all": job_of(tables, 2, TELL),
        "second": job_of(tables, 1, wait),
    }  # fmt: skip

    failed = run(tables, tmp_path, jobs, 2)

    seen = {name: (tmp_path / name / f"{name}.jsonl").read_text() for name in jobs}
    assert failed == []
    assert seen == {"first": "0", "second": "1", "all": "0,1"}


def test_a_failed_job_is_reported_and_its_log_kept(tables, tmp_path, capsys):
    jobs = {
        "bad": job_of(tables, 1, "raise SystemExit('no card')"),
        "good": job_of(tables, 1, TELL),
    }

    assert run(tables, tmp_path, jobs, 1) == ["bad"]
    assert "bad ended with 1" in capsys.readouterr().out
    assert "no card" in (tmp_path / "bad" / "log").read_text()


def test_a_job_over_its_time_limit_ends_with_all_its_processes(tables, tmp_path):
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{SLEEP}'])"
    jobs = {"long": job_of(tables, 1, code), "late": job_of(tables, 1, TELL)}

    assert run(tables, tmp_path, jobs, 1, seconds=2.0) == ["long", "late"]
    time.sleep(0.2)
    mine = [p for p in psutil.process_iter(["cmdline"]) if SLEEP in (p.info["cmdline"] or [])]
    assert [process for process in mine if is_alive(process)] == []


def test_every_listed_job_is_a_valid_command(tables):
    for job in tables["JOBS"].values():
        script = Path(job.command[1])
        is_script = script.parent == SCRIPT.parent and script.exists()
        assert is_script or job.command[1] == "bench"


def test_a_host_with_too_few_gpus_runs_no_job(tables, tmp_path, monkeypatch, capsys):
    # Without a PATH nvidia-smi is not found, like on a host without GPUs.
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["tables.py", "--gpus", "2", "--folder", str(tmp_path)])

    with pytest.raises(SystemExit) as ended:
        tables["main"]()

    assert ended.value.code == 2
    assert "--gpus is 2 but nvidia-smi tells of 0 here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
