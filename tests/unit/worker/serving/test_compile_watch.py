"""Kernels that are compiled while requests wait."""

import os
import subprocess
import sys

SCRIPT = """
import logging
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trimaran.worker.serving.rank_process import watch_compilations

@triton.jit
def add_one(x, n, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(x + place, tl.load(x + place, mask=place < n) + 1, mask=place < n)

def make(size):
    types = {"x": "*fp32", "n": "i32", "SIZE": "constexpr"}
    source = ASTSource(add_one, types, {"SIZE": size})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))

logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(message)s")
make(32)
watch_compilations()
make(32)
make(64)
"""


def test_a_kernel_that_delays_a_step_is_named(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-P", script], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "kernel" in line]
    assert len(lines) == 2
    assert lines[0].startswith("DEBUG kernel add_one read from the cache while serving")
    assert lines[1].startswith("WARNING kernel add_one compiled while serving, which took")
