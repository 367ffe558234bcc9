"""The report of `trimaran doctor` on this machine."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace

import pytest
from launcher_repository import write_checkpoint, write_model

from trimaran.kernels.build import kernels_folder
from trimaran.kernels.tables.tuned_choices import (
    Tuning,
    TuningKey,
    user_file,
    write_tuning,
)
from trimaran.launcher.cli import main as cli
from trimaran.worker.config.quantization import LOAD_METHODS


def ports(port: int) -> list[str]:
    """Flags that have the doctor look at one port only."""
    return [f"--{name}-port={port}" for name in ("http", "grpc", "metrics")]


def test_the_doctor_finds_this_machine_fit(capsys, free_port):
    assert cli.main(["doctor", *ports(free_port)]) == 0
    report = capsys.readouterr().out
    assert "ok   MPI library    Open MPI v" in report
    assert "BAD" not in report
    assert report.endswith("`trimaran serve` can work here.\n")


def test_a_wrong_mpirun_is_bad_and_code_1(capsys, free_port):
    assert cli.main(["doctor", "--mpirun", "/bin/true", *ports(free_port)]) == 1
    report = capsys.readouterr().out
    assert "BAD  MPI            /bin/true is neither Open MPI nor MPICH" in report
    assert report.endswith("1 problem(s) to fix before `trimaran serve` can work here.\n")


def test_a_busy_port_is_a_note_when_another_port_would_serve(capsys):
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        assert cli.main(["doctor", *ports(port)]) == 0
    assert (
        f"note http port      --http-port {port}: the port is in use" in capsys.readouterr().out
    )


def test_the_doctor_checks_ports_on_the_addresses_that_serve_would_open(capsys, free_port):
    flags = ["--http-address", "192.0.2.1", "--allow-grpc", "false"]
    assert cli.main(["doctor", *ports(free_port), *flags]) == 0
    report = capsys.readouterr().out
    assert "cannot listen on 192.0.2.1" in report
    assert "grpc port" not in report


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--hosts", "nosuch:2"], "--hosts"),
        (["--world-size", "4", "--multi-model"], "--world-size, --multi-model"),
    ],
)
def test_flags_about_models_need_a_repository(capsys, flags, named):
    assert cli.main(["doctor", *flags]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"error: {named} cannot be checked without models" in said.err
    assert "Add --model-repo DIR" in said.err


def repository(tmp_path, **gpus):
    checkpoint = write_checkpoint(tmp_path / "hf")
    for name, ids in gpus.items():
        write_model(
            tmp_path / "repo" / name, gpt_model_path=str(checkpoint), gpu_device_ids=ids
        )
    return ["--model-repo", str(tmp_path / "repo"), "--load-format", "random"]


def test_the_doctor_shows_the_placement_of_ranks(capsys, free_port, tmp_path):
    flags = repository(tmp_path, a="0,1", b="2")
    assert cli.main(["doctor", *ports(free_port), *flags]) == 0
    report = capsys.readouterr().out
    assert "note models         2 token-level models: serve them with --multi-model" in report
    assert "ok   group a        2 rank(s) on cpu" in report
    assert "GPU 1    a rank 1" in report
    assert "GPU 2    b rank 0" in report


def test_the_doctor_says_what_each_quantization_takes(capsys, free_port, tmp_path):
    flags = repository(tmp_path, a="0")
    assert cli.main(["doctor", *ports(free_port), *flags]) == 0
    report = capsys.readouterr().out
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    megabytes = 2 * layers * heads * size * 1000 / 1e6
    dtype = config["torch_dtype"]
    width = {"float32": 4, "bfloat16": 2}[dtype]
    caches = f"{dtype} {megabytes * width:.3g} MB, fp8 {megabytes:.3g} MB, int8 {megabytes:.3g}"
    assert f"KV cache of 1000 tokens: {caches} MB" in report
    weights = re.search(r"weights: (.*)", report)[1]
    sizes = dict(re.findall(r"(\S+) (\S+) GB", weights))
    assert list(sizes) == [dtype, *LOAD_METHODS]
    assert float(sizes["int4"]) < float(sizes["int8"]) < float(sizes[dtype])
    assert "  int4: " in report and " tokens in int8" in report


def test_the_doctor_finds_a_gpu_requested_by_two_models(capsys, free_port, tmp_path):
    flags = repository(tmp_path, a="0,1", b="1")
    assert cli.main(["doctor", *ports(free_port), *flags]) == 1
    report = capsys.readouterr().out
    assert "BAD  models         group 'b' asks for GPU 1, which group 'a' has" in report
    assert "not placed: b (1 rank(s), GPUs 1)" in report


def test_the_doctors_help_fits_a_screen(capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    assert len(capsys.readouterr().out.splitlines()) <= 30


def test_the_doctor_shows_which_tuned_choices_can_be_used(
    capsys, free_port, tmp_path, monkeypatch
):
    # The doctor compiles the CPU's kernels where the cache has none.
    compiled = kernels_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "trimaran").mkdir()
    (tmp_path / "trimaran" / "kernels").symlink_to(compiled)
    key = TuningKey.of("NVIDIA H200")
    entries = {"3072x2048 plain": [(8, [64, 96, 1, 1])]}
    write_tuning(user_file(), Tuning(key, entries, {}))
    old = replace(key, card="NVIDIA A", kernels="older")
    write_tuning(user_file(), Tuning(old, entries, {}))

    assert cli.main(["doctor", *ports(free_port)]) == 0
    report = capsys.readouterr().out
    assert "ok   tuned kernels  1 products, 0 of experts on NVIDIA H200: " in report
    assert (
        "note tuned kernels  1 products, 0 of experts on NVIDIA A, by other kernels" in report
    )

    user_file().write_text("{}")
    assert cli.main(["doctor", *ports(free_port)]) == 1
    assert f"BAD  tuned kernels  {user_file()}: holds no choices" in capsys.readouterr().out
