"""NVIDIA's perf_analyzer, unmodified, against Python models over HTTP and gRPC."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served

# A window of 50 requests is stable within 90 %, whatever else the machine does.
WINDOW = (
    "--measurement-mode",
    "count_windows",
    "--measurement-request-count",
    "50",
    "-s",
    "90",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The models of the comparison with Triton."""
    folder = tmp_path_factory.mktemp("perf")
    shutil.copytree(Path(__file__).parent / "parity" / "models", folder / "models")
    every = ("--model-control-mode", "explicit", "--load-model", "*")
    with Served(folder / "models", flags=every, log_path=folder / "log") as served:
        yield served


def _measured(perf_analyzer: tuple[Path, Path], *arguments: str) -> int:
    """Run a measurement; returns the number of successful requests that the server told."""
    program, libraries = perf_analyzer
    done = subprocess.run(
        [str(program), *arguments, *WINDOW],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.findall(r"Successful request count: (\d+)", done.stdout)
    return int(counts[-1])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_model_is_measured_with_the_statistics_of_the_server(perf_analyzer, server, protocol):
    port = server.http_port if protocol == "http" else server.grpc_port
    address = f"127.0.0.1:{port}"
    assert _measured(perf_analyzer, "-m", "numbers", "-u", address, "-i", protocol) >= 50


def test_strings_are_measured_beside_the_metrics_of_the_server(perf_analyzer, server):
    assert _measured(
        perf_analyzer, "-m", "text", "-u", f"127.0.0.1:{server.http_port}", "--shape", "TEXT:1",
        "--string-length", "5", "--collect-metrics", "--metrics-url",
        f"127.0.0.1:{server.metrics_port}/metrics",
    ) >= 50  # fmt: skip


def test_streams_of_a_decoupled_model_are_measured(perf_analyzer, server, tmp_path):
    data = {"COUNT": [3], "FAIL_AT": [-1], "FINAL_WITH_LAST": [True]}
    inputs = tmp_path / "inputs.json"
    inputs.write_text(json.dumps({"data": [data]}))
    assert _measured(
        perf_analyzer, "-m", "repeater", "-u", f"127.0.0.1:{server.grpc_port}", "-i", "grpc",
        "--async", "--streaming", "--input-data", str(inputs), "--concurrency-range", "4",
    ) >= 50  # fmt: skip
