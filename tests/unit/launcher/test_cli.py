"""The command itself, whatever it was started with."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
