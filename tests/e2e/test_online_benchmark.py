"""`benchmarks/online.py`: which points run, the lines, and what an early end leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trimaran.bench.serving.server_process import ServerFailedError, serving, write_repository

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "online.py"
SMALL = (
    "--device", "cpu", "--num-threads", "1", "--world-size", "1", "--frontend-processes", "1",
    "--requests", "2",
)  # fmt: skip


def start(*flags):
    # The installed package alone is imported, no neighbour of the script.
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
    )


def run(*flags):
    with start(*flags) as script:
        out, err = script.communicate(timeout=250)
    return script.returncode, out, err


def test_a_measured_point_is_one_line_with_load_runs_and_command(tmp_path):
    path = tmp_path / "lines.jsonl"
    flags = ["--protocols", "http", "--points", "467/256@2", *SMALL, "--json", path]
    flags += ["--runs", "2"]

    code, out, err = run(*flags)

    assert code == 0, out + err
    (line,) = map(json.loads, path.read_text().splitlines())
    named = {"isl": 467, "osl": 256, "requests": 2, "request_rate": 2.0, "concurrency": 500}
    assert line.items() >= {**named, "temperature": 1.0, "failed_requests": 0}.items()
    assert line["out_tok_s"] > 0
    assert len(line["out_tok_s_runs"]) == 2
    low, high = line["ttft_ms_avg_runs"]
    assert low <= line["ttft_ms_avg"] <= high
    assert line["command"].startswith("python benchmarks/online.py --protocols http")
    assert "467/256x2" in out


@pytest.mark.matrix(keep=0)
def test_points_beyond_the_time_limit_are_named_and_make_the_exit_code_1(tmp_path):
    path = tmp_path / "lines.jsonl"
    flags = ["--protocols", "http", "--points", "467/256@2", *SMALL, "--json", path]

    # More than a start takes, less than what so many runs of the point are given.
    code, out, err = run(*flags, "--seconds", "40", "--runs", "4")

    assert code == 1
    assert "left out: http 467/256@2" in err, out + err
    assert not path.exists()


def test_a_server_that_does_not_start_ends_the_benchmark_with_the_log():
    code, _, err = run(*SMALL, "--max-num-tokens", "0")
    assert code == 1
    assert "the server was not ready after" in err
    assert "max" in err.partition("its log:")[2]


def test_an_unknown_point_is_refused():
    code, _, err = run("--points", "1/1x1")
    assert code == 2
    assert "467/256x500" in err


@pytest.mark.matrix(keep=0)
def test_a_signal_ends_the_server_and_the_load_too():
    flags = ["--protocols", "http", "--points", "467/256@2", *SMALL]
    with start(*flags) as script:
        try:
            below = processes_below(script, awaited="--multiprocessing-fork")
        finally:
            script.send_signal(signal.SIGTERM)
        _, err = script.communicate(timeout=60)
    assert script.returncode == 143, err
    assert psutil.wait_procs(below, timeout=60)[1] == []


def processes_below(script, awaited):
    """All of them once one has the awaited word in its command line."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        below = psutil.Process(script.pid).children(recursive=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(awaited in process.cmdline() for process in below):
                return below
        time.sleep(0.1)
    raise TimeoutError(f"no process below has {awaited} in its command line")


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path):
    write_repository(tmp_path / "repository", ["tensorrt_llm"], engine_dir=tmp_path)
    begin = time.monotonic()
    with (
        pytest.raises(ServerFailedError, match="was not ready"),
        serving(tmp_path / "repository", [], log=tmp_path / "log", longest_s=0.0),
    ):
        pass
    assert time.monotonic() - begin < 30
