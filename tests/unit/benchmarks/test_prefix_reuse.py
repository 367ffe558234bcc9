"""`benchmarks/prefix_reuse.py`: its message if nothing can be measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from trimaran.bench.serving.free_ports import free_ports

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "prefix_reuse.py"


def test_without_a_server_the_program_fails_with_its_address():
    url = f"127.0.0.1:{free_ports(1)[0]}"

    done = subprocess.run(
        [sys.executable, SCRIPT, "--url", url, "--prefix", "8"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 1
    assert done.stderr.startswith(f"no answer from http://{url}: ")
    assert done.stderr.count("\n") == 1
