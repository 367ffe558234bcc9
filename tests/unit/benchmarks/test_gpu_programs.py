"""Programs of `benchmarks/` that need a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAMS = {
    **{path.name: () for path in sorted((ROOT / "benchmarks").glob("gpu_*.py"))},
    "host_memory.py": (),
    "tune_products.py": ("--output", "none.json"),
    "tune_experts.py": ("--output", "none.json"),
}
"""With the flags that each must have."""


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gpu_programs_without_a_gpu_fail_with_one_sentence(program):
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / program, *PROGRAMS[program]],
        # Programs import what lies beside them.
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 1
    assert done.stderr == "torch finds no GPU here: run this on a machine with one\n"
