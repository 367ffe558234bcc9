"""Kernels that are compiled while requests wait."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from trimaran.comm.deadlines import Watchdog
from trimaran.kernels.compilations import hooks
from trimaran.worker.engine.compilations import Compilations

SCRIPT = """
import logging
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trimaran.worker.engine.compilations import Compilations

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
compilations = Compilations()
compilations.watch(None, 60.0)
make(32)
make(64)
print(compilations.values())
"""


def test_a_kernel_that_delays_a_step_is_named(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-P", script], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'num_compiled_kernels': 1, 'num_loaded_kernels': 1}\n"
    lines = [line for line in done.stderr.splitlines() if "kernel" in line]
    assert len(lines) == 2
    assert lines[0].startswith("DEBUG kernel add_one read from the cache while serving")
    assert lines[1].startswith("WARNING kernel add_one compiled while serving, which took")


@pytest.fixture
def compilations(monkeypatch):
    """Those of this process, which ends the watch of an earlier test."""
    monkeypatch.setattr(hooks, "_listener", None)
    return Compilations()


def test_a_rank_that_compiles_is_not_hung(compilations):
    barked = threading.Event()
    watchdog = Watchdog(0.2, barked.set)
    compilations.watch(watchdog, 60.0)
    watchdog.watch(lambda: "a step")

    with hooks.waiting("attention.cu"):
        assert not barked.wait(0.8)
        hooks.compiled()

    # The step itself may still hang.
    assert barked.wait(60.0)
    watchdog.stop()
    assert compilations.num_compiled == 1


def test_a_rank_that_waits_for_threads_that_compile_is_not_hung(compilations):
    barked = threading.Event()
    watchdog = Watchdog(0.2, barked.set)
    compilations.watch(watchdog, 60.0)
    watchdog.watch(lambda: "a step")

    def compile_one(name):
        with hooks.waiting(name):
            time.sleep(0.8)
            hooks.compiled()

    with hooks.waiting("products"), ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, ("products.cu", "more.cu")))
    assert not barked.is_set()
    watchdog.stop()
    # The step waited once.
    assert compilations.values() == {"num_compiled_kernels": 1, "num_loaded_kernels": 0}


def test_a_compilation_that_fails_ends_the_wait(compilations):
    barked = threading.Event()
    watchdog = Watchdog(0.2, barked.set)
    compilations.watch(watchdog, 60.0)
    watchdog.watch(lambda: "a step")

    with pytest.raises(OSError), hooks.waiting("attention.cu"):
        raise OSError

    assert barked.wait(60.0)
    watchdog.stop()
    assert compilations.num_compiled == 0


def test_kernels_that_other_threads_compile_ahead_do_not_count(compilations):
    compilations.watch(None, 60.0)

    def compile_ahead():
        with hooks.waiting("attention.cu"):
            hooks.compiled()

    thread = threading.Thread(target=compile_ahead)
    thread.start()
    thread.join()

    assert compilations.values() == {"num_compiled_kernels": 0, "num_loaded_kernels": 0}
