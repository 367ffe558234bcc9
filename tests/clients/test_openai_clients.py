"""OpenAI clients and NVIDIA's benchmarks, unmodified, each in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from served import DEMO_MODEL, Served, command_env, free_ports, init_repo, run_trimaran

PROGRAMS = Path(__file__).with_name("programs")
MODEL = "gpt-4o-mini"
"""LlamaIndex takes the names of OpenAI's own models alone."""

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_REQUESTS = 8


@dataclass(frozen=True)
class OpenAiServer:
    """A server with an OpenAI port."""

    served: Served
    port: int


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAiServer]:
    """The demo model under another name, with a chat template and guided decoding."""
    folder = tmp_path_factory.mktemp("openai")
    build = "build", "--checkpoint", str(DEMO_MODEL), "--output", str(folder / "engine")
    done = run_trimaran(*build, "--max-batch-size", "8")
    assert done.returncode == 0, done.stderr
    values = (
        f"tokenizer_dir:{DEMO_MODEL},engine_dir:{folder / 'engine'},decoupled_mode:True,"
        "guided_decoding_backend:xgrammar"
    )
    init_repo(str(folder / "models"), "--defaults", "--fill", values)
    config = folder / "models" / MODEL / "config.pbtxt"
    (folder / "models" / "ensemble").rename(config.parent)
    config.write_text(config.read_text().replace('name: "ensemble"', f'name: "{MODEL}"'))
    (folder / "template.jinja").write_text(TEMPLATE)
    (port,) = free_ports(1)
    flags = (
        "--openai-port", str(port), "--chat-template", str(folder / "template.jinja"),
        "--tool-call-parser", "hermes",
    )  # fmt: skip
    with Served(folder / "models", flags=flags, log_path=folder / "log") as served:
        yield OpenAiServer(served, port)


def _environment(folder: Path, *packages: str) -> Path:
    """The programs of a new environment with these packages alone."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    pip = folder / "bin" / "pip"
    command = [str(pip), "install", "-q", "--disable-pip-version-check", *packages]
    subprocess.run(command, check=True, timeout=900)
    return folder / "bin"


def _own_env(**changes: str) -> dict[str, str]:
    env = {k: v for k, v in command_env().items() if not k.startswith("PYTHON")}
    return {**env, **changes}


@pytest.mark.parametrize(
    ("package", "program"),
    [("langchain-openai", "langchain_program.py"),
     ("llama-index-llms-openai", "llama_index_program.py")],
)  # fmt: skip
@pytest.mark.timeout(900)
def test_the_openai_classes_of_frameworks_work_unmodified(server, tmp_path, package, program):
    programs = _environment(tmp_path / "venv", package)
    done = subprocess.run(
        [str(programs / "python"), str(PROGRAMS / program),
         f"http://127.0.0.1:{server.port}/v1"],
        capture_output=True, text=True, timeout=300, env=_own_env(), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all answers are as they should be" in done.stdout


@pytest.fixture(scope="module")
def aiperf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NVIDIA's aiperf."""
    folder = tmp_path_factory.mktemp("aiperf")
    os.symlink(DEMO_MODEL, folder / "tokenizer")
    return _environment(folder / "venv", "aiperf") / "aiperf"


OF_TRITON = (
    "--endpoint-type", "template", "--extra-inputs", "payload_template:payload.json",
    "--extra-inputs", "response_field:text_output",
)  # fmt: skip


@pytest.mark.parametrize(
    "mode",
    [("chat", "--streaming"), ("chat",), ("completions", "--streaming"),
     ("responses", "--streaming"), ("template",), ("template", "--streaming")],
    ids="-".join,
)  # fmt: skip
@pytest.mark.timeout(900)
def test_aiperf_measures_every_endpoint_without_an_error(server, aiperf, tmp_path, mode):
    kind, *streaming = mode
    words, port = ("--endpoint-type", kind), server.port
    if kind == "template":
        route = "generate_stream" if streaming else "generate"
        body = '{"text_input": {{ text|tojson }}, "max_tokens": 8%s}'
        (tmp_path / "payload.json").write_text(body % (', "stream": true' * len(streaming)))
        words = (*OF_TRITON, "--endpoint", f"/v2/models/{MODEL}/{route}")
        port = server.served.http_port
    os.symlink(aiperf.parents[2] / "tokenizer", tmp_path / "tokenizer")
    metrics = f"http://127.0.0.1:{server.served.metrics_port}/metrics"
    done = subprocess.run(
        [str(aiperf), "profile", "-m", MODEL, "--url", f"http://127.0.0.1:{port}", *words,
         *streaming, "--request-count", str(NUM_REQUESTS), "--concurrency", "2", "--isl", "20",
         "--osl", "8", "--tokenizer", "./tokenizer", "--ui", "none", "--random-seed", "1",
         "--server-metrics", metrics, "--output-artifact-dir", "found"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env=_own_env(HOME=str(tmp_path)),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = (tmp_path / "found").glob("profile_export_aiperf.json")
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS, found
    assert found.get("error_request_count", {"avg": 0})["avg"] == 0, found
    if streaming:
        assert found["time_to_first_token"]["avg"] > 0


@pytest.fixture(scope="module")
def genai_perf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NVIDIA's genai-perf."""
    folder = tmp_path_factory.mktemp("genai_perf")
    return _environment(folder / "venv", "genai-perf==0.0.16") / "genai-perf"


@pytest.mark.parametrize(
    "mode",
    [("chat", "--streaming"), ("chat",), ("completions", "--streaming"), ("completions",)],
    ids="-".join,
)  # fmt: skip
@pytest.mark.timeout(900)
def test_genai_perf_measures_the_openai_port(server, genai_perf, perf_analyzer, tmp_path, mode):
    kind, *streaming = mode
    program, libraries = perf_analyzer
    os.symlink(DEMO_MODEL, tmp_path / "tokenizer")
    path = f"{program.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(genai_perf), "profile", "-m", MODEL, "--endpoint-type", kind, *streaming,
         "--url", f"127.0.0.1:{server.port}", "--request-count", str(NUM_REQUESTS),
         "--concurrency", "2", "--synthetic-input-tokens-mean", "10", "--output-tokens-mean",
         "8", "--warmup-request-count", "0", "--tokenizer", "./tokenizer"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env=_own_env(HOME=str(tmp_path), PATH=path, LD_LIBRARY_PATH=str(libraries)),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = tmp_path.glob("artifacts/*/profile_export_genai_perf.json")
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS, found
    assert found["output_sequence_length"]["avg"] > 0, found
    if streaming:
        assert found["time_to_first_token"]["avg"] > 0


def test_requests_as_genai_perf_sends_them_are_answered(server):
    served = server.served
    # Its endpoint type `generate` sends a list of one text.
    body = {"text_input": ["It was"], "max_tokens": 8}
    status, answer = served.post(f"/v2/models/{MODEL}/generate", body)
    assert status == 200 and answer["text_output"]
    events = served.events(f"/v2/models/{MODEL}/generate_stream", {**body, "stream": True})
    # A stream leaves the prompt out.
    text = "".join(event["text_output"] for event in events)
    assert answer["text_output"] == "It was" + text
    # Its endpoint type `kserve` has perf_analyzer send these tensors over one stream.
    found: list[Any] = []
    with triton.InferenceServerClient(f"127.0.0.1:{served.grpc_port}") as client:
        client.start_stream(lambda result, error: found.append((result, error)))
        inputs = [triton.InferInput("text_input", [1, 1], "BYTES")]
        inputs[0].set_data_from_numpy(np.array([["It was"]], object))
        for name, kind, value in (
            ("max_tokens", "INT32", 8), ("exclude_input_in_output", "BOOL", True),
            ("stream", "BOOL", True),
        ):  # fmt: skip
            inputs.append(triton.InferInput(name, [1, 1], kind))
            inputs[-1].set_data_from_numpy(
                np.array([[value]], np.int32 if kind == "INT32" else bool)
            )
        client.async_stream_infer(
            MODEL, inputs, request_id="1", enable_empty_final_response=True
        )
        client.stop_stream()
    assert all(error is None for _, error in found), found
    finals = [r.get_response().parameters["triton_final_response"].bool_param for r, _ in found]
    assert finals == [False] * (len(finals) - 1) + [True]
    texts = [r.as_numpy("text_output") for r, _ in found]
    assert b"".join(each.item() for each in texts if each is not None).decode() == text
