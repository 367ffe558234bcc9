"""`trimaran bench throughput`: a real engine on the CPU, tokens counted, results kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from trimaran.bench.offline.engine_run import OfflineRun
from trimaran.bench.offline.throughput import token_times
from trimaran.launcher.cli.main import main
from trimaran.launcher.starters.run_dir import RunDir

DEMO = Path(__file__).parents[4] / "examples" / "demo_models" / "base"
FLAGS = ["--shape", "tiny", "--device", "cpu", "--runs", "2", "--ceiling-seconds", "0.2"]


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize(
    ("command", "asked", "cached"),
    [("throughput", "fp8_e4m3", "fp8"), ("latency", "auto", "bfloat16")],
)
def test_results_name_the_load_the_limit_and_the_command(
    tmp_path, capsys, command, asked, cached
):
    output = tmp_path / "results.jsonl"

    code = main(
        [
            "bench",
            command,
            *FLAGS,
            "--kv-cache-dtype",
            asked,
            "--load",
            "20/6x2",
            "--load",
            "5/3x1",
            "--output",
            str(output),
        ]
    )

    assert code == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["isl"], line["osl"], line["requests"]) for line in lines] == [
        (20, 6, 2),
        (5, 3, 1),
    ]
    for line in lines:
        assert (line["shape"], line["gpus"]) == ("tiny", 0)
        assert line["kv_cache_dtype"] == cached
        assert len(line["out_tok_s_runs"]) == 2
        assert line["limit_pct"] > 0
        assert line["out_tok_s"] == pytest.approx(sum(line["out_tok_s_runs"]) / 2, rel=0.01)
        assert {"device", "torch", "commit", "command", "ceiling_tflops"} <= line.keys()
    assert "20/6x2" in capsys.readouterr().out


def test_the_folder_of_a_killed_benchmark_is_deleted_by_the_next_server(tmp_path):
    code = (
        "from trimaran.bench.offline.engine_run import random_checkpoint\n"
        "with random_checkpoint({}): print(); input()"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (folder,) = tmp_path.glob("trimaran-bench-*")
        # A server that starts during the benchmark keeps the folder.
        RunDir(str(tmp_path)).remove()
        assert folder.is_dir()
        process.kill()

    RunDir(str(tmp_path)).remove()

    assert not folder.exists()


def test_a_checkpoint_is_measured_in_the_requested_dtype(tmp_path):
    output = tmp_path / "results.jsonl"
    flags = ["--model", str(DEMO), "--dtype", "float32", "--load", "5/3x1", "--runs", "1"]

    code = main(
        ["bench", "throughput", *flags, "--device", "cpu", "--ceiling-seconds", "0.1",
         "--output", str(output)]
    )  # fmt: skip

    assert code == 0
    line = json.loads(output.read_text())
    assert (line["shape"], line["dtype"]) == ("base", "float32")


def test_a_checkpoint_with_optional_keys_is_compared_with_its_limit(tmp_path):
    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    output = tmp_path / "results.jsonl"
    flags = ["--model", str(tmp_path / "gpt2"), "--load", "5/3x1", "--runs", "1"]

    code = main(
        ["bench", "throughput", *flags, "--device", "cpu", "--ceiling-seconds", "0.1",
         "--output", str(output)]
    )  # fmt: skip

    assert code == 0
    line = json.loads(output.read_text())
    assert (line["shape"], line["dtype"]) == ("gpt2", "float32")
    assert line["limit_pct"] > 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--load", "20x6"], "'20x6' is not a load"),
        (["--load", "20/0x6"], "start at 1"),
        (["--model", "nowhere"], "nowhere: no such folder. Name an engine folder"),
        (["--gpu-memory", "1.5"], "--gpu-memory is 1.5"),
        (["--tp-size", "2"], "needs 2 ranks but 1 run"),
        (
            ["--tp-size", "2", "--moe-ep-size", "3"],
            "--moe-ep-size (3) must divide --tp-size (2)",
        ),
        (
            ["--profile", "steps=1:2", "--profile-dir", "/proc/x"],
            "--profile-dir /proc/x: No such",
        ),
        (["--profile", "steps=1:2"], "has no folder to write to. Add --profile-dir"),
        (
            ["--profile-dir", "x"],
            "--profile-dir x has no effect: name the steps with --profile",
        ),
    ],
)
def test_impossible_measurements_are_refused(capsys, flags, complaint):
    assert (
        main(["bench", "throughput", "--device", "cpu", "--ceiling-seconds", "0", *flags]) == 2
    )
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--runs", "0"),
        ("--tp-size", "0"),
        ("--moe-rebalance-steps", "-1"),
        ("--kv-host-gib", "nan"),
        ("--temperature", "nan"),
        ("--ceiling-seconds", "-1"),
    ],
)
def test_impossible_numbers_are_refused(capsys, flag, value):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "throughput", flag, value])
    assert ended.value.code == 2
    assert f"{flag}: '{value}' is not a" in capsys.readouterr().err


def test_the_time_to_the_first_token_is_that_of_all_requests():
    quick = OfflineRun(first_token_s=[0.1, 0.2, 0.6], steps_s=[0.2, 0.4, 0.01, 0.03])
    slow = OfflineRun(first_token_s=[0.3, 0.4, 0.5], steps_s=[0.2, 0.4, 0.02, 0.03])

    times = token_times([quick, slow])

    assert times["first_token_ms"] == 350.0
    assert times["token_ms_p50"] == 25.0


def test_outputs_without_a_time_between_tokens_have_no_latency(capsys):
    assert main(["bench", "latency", "--load", "8/4x1", "--load", "8/2x1"]) == 2
    assert "--load 8/2x1: 2 new tokens have no time between them" in capsys.readouterr().err


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("flags", [("--rows", "0"), ("--rows", "-4"), ("--context", "0")])
def test_a_layer_without_rows_is_refused(flags):
    program = "import sys; from trimaran.launcher.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "bench", "kernels"]
    done = subprocess.run(
        [*command, "--shape", "tiny", "--device", "cpu", "--ceiling-seconds", "0", *flags],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"{flags[0]}: '{flags[1]}' is not a whole number of 1 or more" in done.stderr


def test_requested_steps_are_traced(tmp_path):
    flags = ["--load", "5/9x1", "--profile", "steps=4:6", "--profile-dir", str(tmp_path)]
    assert main(["bench", "throughput", *FLAGS, *flags]) == 0
    (trace,) = tmp_path.iterdir()
    assert trace.name.endswith(".trace.json.gz")


def test_every_operator_of_a_layer_is_compared_with_its_limit(tmp_path, capsys):
    output = tmp_path / "kernels.jsonl"
    flags = ["--shape", "tiny", "--device", "cpu", "--rows", "2", "--context", "40"]

    code = main(
        ["bench", "kernels", *flags, "--ceiling-seconds", "0.2", "--output", str(output)]
    )

    assert code == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    names = ["qkv", "out", "gate_up", "down", "add_rms_norm", "silu_and_mul", "decode"]
    assert [line["operator"] for line in lines] == names
    assert all(line["us"] > 0 and line["torch_us"] > 0 for line in lines)
    assert all(line["limit_pct"] > 0 for line in lines)
    assert "2 at 40" in capsys.readouterr().out


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize(("rows", "context"), [("2147483647", "8"), ("1", "2147483647")])
def test_kernels_beyond_the_memory_are_refused(capsys, rows, context):
    flags = ["--rows", rows, "--context", context, "--ceiling-seconds", "0"]
    words = ["--device", "cpu", "--dtype", "float32", "--shape", "tiny"]
    # Above what any host has: terabytes.
    assert main(["bench", "kernels", *words, *flags]) == 2
    complaint = f"--rows {rows} with --context {context} of --shape tiny need more memory than"
    assert complaint in capsys.readouterr().err


def test_gpu_kernels_are_refused_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "kernels", "--shape", "tiny"]) == 2
    assert "torch finds no GPU here: name --device cpu" in capsys.readouterr().err


def test_a_published_shape_runs_with_a_few_of_its_layers(tmp_path):
    output = tmp_path / "results.jsonl"
    flags = [
        "--shape",
        "phi3_mini",
        "--layers",
        "1",
        "--device",
        "cpu",
        "--ceiling-seconds",
        "0",
    ]

    code = main(
        [
            "bench",
            "throughput",
            *flags,
            "--runs",
            "1",
            "--load",
            "4/2x1",
            "--output",
            str(output),
        ]
    )

    assert code == 0
    (line,) = [json.loads(line) for line in output.read_text().splitlines()]
    assert (line["shape"], line["requests"]) == ("phi3_mini_1l", 1)


def test_layers_of_a_folder_are_not_cut(capsys):
    flags = ["--model", str(DEMO), "--layers", "1", "--device", "cpu", "--load", "4/2x1"]
    assert main(["bench", "throughput", *flags]) == 2
    assert "--layers 1 cuts a --shape, not --model" in capsys.readouterr().err
