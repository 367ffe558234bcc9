"""`--peer`: another engine does the same work in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trimaran.bench.offline import peers
from trimaran.bench.offline.load import Load
from trimaran.launcher.cli.main import main

FLAGS = ["--shape", "tiny", "--device", "cpu", "--ceiling-seconds", "0", "--runs", "1"]

# An engine with the awkward behaviour of vLLM: it prints to stdout, and its child processes
# outlive it and keep printing.
LIKE_VLLM = """
import os, subprocess, sys, time
from types import SimpleNamespace as Fields

class SamplingParams(Fields):
    pass

class LLM:
    def __init__(self, **flags):
        print("loading", flags["model"], flush=True)
        talk = "import time\\nwhile True: print('[1]', flush=True); time.sleep(0.01)"
        child = subprocess.Popen([sys.executable, "-c", talk])
        with open(flags["model"] + "/pid", "w") as file:
            file.write(str(child.pid))
        os.rename(flags["model"] + "/pid", flags["model"] + "/child")

    def generate(self, inputs, sampling, use_tqdm):
        if sampling.max_tokens == 1000:
            time.sleep(600)
        length = sampling.max_tokens - (sampling.temperature == 0)
        return [Fields(outputs=[Fields(token_ids=[1] * length)]) for _ in inputs]
"""


@pytest.fixture
def like_vllm(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LIKE_VLLM)
    (package / "platforms.py").write_text(
        "import types\ncurrent_platform = types.SimpleNamespace(device_type='cpu')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.syspath_prepend(package.parent)


def _work(folder: Path, temperature: float = 1.0, device: str = "cpu") -> peers.PeerRun:
    loads = [Load(isl=4, osl=3, requests=2, temperature=temperature)]
    return peers.PeerRun(
        model=str(folder), is_random=True, dtype="float32", device=device, vocab_size=100,
        loads=loads, runs=2, max_num_seqs=2, max_num_tokens=64, gpu_memory=0.9, threads=1,
    )  # fmt: skip


def _is_alive(folder: Path) -> bool:
    """Whether what the engine started still runs; a zombie does not."""
    try:
        stat = Path("/proc", (folder / "child").read_text(), "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _wait_until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)


@pytest.mark.matrix(keep=0)
def test_transformers_does_the_same_work(tmp_path):
    output = tmp_path / "results.jsonl"
    flags = [*FLAGS, "--load", "6/3x2", "--peer", "transformers", "--output", str(output)]
    assert main(["bench", "throughput", *flags]) == 0
    ours, theirs = (json.loads(line) for line in output.read_text().splitlines())
    assert (ours["engine"], theirs["engine"]) == ("trimaran", "transformers")
    assert {ours["requests"], theirs["requests"]} == {2}
    assert theirs["out_tok_s"] > 0
    assert theirs["transformers_version"]
    # Only the memory of this program's ranks is known.
    assert "memory_gb" in ours and "memory_gb" not in theirs


def test_a_peer_that_is_not_installed_is_refused_before_anything_runs():
    with pytest.raises(peers.ConfigError, match=r"--peer no_such_engine: .* is not installed"):
        peers.check_installed("no_such_engine")


def test_output_and_processes_of_a_peer_do_not_disturb_results_and_end_with_the_peer(
    tmp_path, like_vllm
):
    ((first, second),) = peers.run_peer("vllm", _work(tmp_path))
    assert first > 0
    assert second > 0
    assert not _is_alive(tmp_path)


def test_a_peer_with_incomplete_outputs_fails_with_its_own_message(tmp_path, like_vllm):
    with pytest.raises(peers.ConfigError, match=r"ended with 1: (.|\n)*4 tokens came, 6 were"):
        peers.run_peer("vllm", _work(tmp_path, temperature=0.0))
    assert not _is_alive(tmp_path)


def test_weights_that_vllm_draws_for_experts_are_refused(like_vllm, capsys):
    flags = ["--device", "cpu", "--load", "4/3x2", "--peer", "vllm"]
    assert main(["bench", "throughput", "--shape", "tiny_latent", *flags]) != 0
    error = capsys.readouterr().err
    assert "all tokens choose the same few of 16 experts" in error
    assert "with --model in place of --shape" in error


def test_a_choice_of_kernels_for_vllm_is_refused_without_vllm(capsys):
    flags = ["--device", "cpu", "--load", "4/3x2", "--vllm-linear-backend", "marlin"]
    assert main(["bench", "throughput", *flags]) != 0
    assert "--vllm-linear-backend marlin has no effect" in capsys.readouterr().err


def test_vllm_on_another_device_is_refused(tmp_path, like_vllm):
    with pytest.raises(peers.ConfigError, match=r"vLLM would run on cpu, not on cuda"):
        peers.run_peer("vllm", _work(tmp_path, device="cuda"))


def test_a_peer_ends_with_its_parent_process(tmp_path, like_vllm):
    work = replace(_work(tmp_path), loads=[Load(isl=4, osl=1000, requests=2)])
    source = (
        "from trimaran.bench.offline.load import Load\n"
        "from trimaran.bench.offline.peers import PeerRun, run_peer\n"
        f"run_peer('vllm', {work!r})"
    )
    with subprocess.Popen([sys.executable, "-c", source]) as caller:
        try:
            _wait_until((tmp_path / "child").exists)
        finally:
            caller.kill()
    _wait_until(lambda: not _is_alive(tmp_path))
