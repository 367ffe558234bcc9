"""NVIDIA's perf_analyzer, unmodified, against Python models and the models of a documented
repository, over HTTP and gRPC."""

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
    every = ("--model-control-mode", "explicit", "--load-model", "*", "--allow-client-shm=true")
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


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tensors_in_shared_memory_are_measured(perf_analyzer, server, protocol):
    port = server.http_port if protocol == "http" else server.grpc_port
    assert _measured(
        perf_analyzer, "-m", "numbers", "-u", f"127.0.0.1:{port}", "-i", protocol,
        "--shared-memory", "system", "--output-shared-memory-size", "4096",
    ) >= 50  # fmt: skip


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


TEXT = {"text_input": ["It was a dark and"], "max_tokens": [3]}
IDS = {
    "input_ids": {"content": [5, 6, 7, 8], "shape": [4]},
    "input_lengths": [4],
    "request_output_len": [3],
}
STEPS = ("--bls-composing-models", "preprocessing,tensorrt_llm,postprocessing")
FORMS: dict[str, tuple[str, dict[str, object], tuple[str, ...]]] = {
    "ensemble": ("ensemble", TEXT, ()),
    "ensemble-async": ("ensemble", TEXT, ("--async", "--concurrency-range", "4")),
    "token": ("tensorrt_llm", IDS, ()),
    "token-rate": ("tensorrt_llm", IDS, ("--request-rate-range", "40")),
    "bls": ("tensorrt_llm_bls", TEXT, STEPS),
}


def _of_data(path: Path, data: dict[str, object]) -> tuple[str, ...]:
    """The flags of a run of 50 requests with these inputs."""
    path.write_text(json.dumps({"data": [data]}))
    return ("--input-data", str(path), "--request-count", "50")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_models_of_texts_and_of_tokens_are_measured(
    perf_analyzer, plain, tmp_path, protocol, form
):
    model, data, more = FORMS[form]
    port = plain.http_port if protocol == "http" else plain.grpc_port
    assert _measured(
        perf_analyzer, "-m", model, "-u", f"127.0.0.1:{port}", "-i", protocol, *more,
        *_of_data(tmp_path / "inputs.json", data),
    ) >= 50  # fmt: skip


def test_tensors_in_json_are_measured(perf_analyzer, plain, tmp_path):
    forms = ("--input-tensor-format", "json", "--output-tensor-format", "json")
    assert _measured(
        perf_analyzer, "-m", "ensemble", "-u", f"127.0.0.1:{plain.http_port}", *forms,
        *_of_data(tmp_path / "inputs.json", TEXT),
    ) >= 50  # fmt: skip


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("ensemble", {**TEXT, "stream": [True]}),
        ("tensorrt_llm_bls", {**TEXT, "stream": [True]}),
        ("tensorrt_llm", {**IDS, "streaming": [True]}),
    ],
)
def test_token_streams_are_measured_with_the_time_of_each_response(
    perf_analyzer, decoupled, tmp_path, model, data
):
    export = tmp_path / "export.json"
    assert _measured(
        perf_analyzer, "-m", model, "-u", f"127.0.0.1:{decoupled.grpc_port}", "-i", "grpc",
        "--async", "--streaming", "--concurrency-range", "4", "--profile-export-file",
        str(export), *_of_data(tmp_path / "inputs.json", data),
    ) >= 50  # fmt: skip
    # No JSON: the program writes the bytes of integers into strings.
    times = re.findall(rb'"response_timestamps":\[([\d,]*)\]', export.read_bytes())
    counts = {len(each.split(b",")) for each in times}
    assert len(times) >= 50
    # A slow reader may get tokens together, and the last response may be an empty one.
    assert counts <= {2, 3, 4} and max(counts) >= 3
