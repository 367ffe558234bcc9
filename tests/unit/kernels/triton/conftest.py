"""Kernels compiled for a Hopper GPU, by a process that the tests of all kernels share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PROGRAM = Path(__file__).with_name("hopper_compiler.py")


class Compiled(NamedTuple):
    """What Triton makes of a kernel."""

    ptx: str
    shared_bytes: int
    cubin_bytes: int


class HopperCompiler:
    """The compiling process, started at its first kernel: its imports take seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def _started(self) -> subprocess.Popen[str]:
        # Unit tests have Triton interpret the kernels that they import.
        env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(self._folder)}
        with open(self._folder / "errors", "wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-P", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
            )

    def __call__(
        self,
        kernel: str,
        types: dict[str, str],
        multiples: tuple[str, ...],
        options: dict[str, int],
        **constants: Any,
    ) -> Compiled:
        """Compile ``module.kernel`` of `kernels/triton`; ``multiples`` names the integers that
        are multiples of 16. Constants that the kernel does not have are left out."""
        if self._process is None:
            self._process = self._started()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        module, _, name = kernel.rpartition(".")
        asked = {
            "module": module, "kernel": name, "constants": constants, "types": types,
            "multiples": multiples, "options": options,
        }  # fmt: skip
        try:
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            # A crash of the compiler fails one test: the next one starts another process.
            self.close()
            pytest.fail(f"the compiler ended:\n{(self._folder / 'errors').read_text()}")
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return Compiled(**answer)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


@pytest.fixture(scope="session")
def compile_for_hopper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HopperCompiler]:
    """Compiles kernels for a Hopper GPU, see ``HopperCompiler.__call__``."""
    compiler = HopperCompiler(tmp_path_factory.mktemp("compiled"))
    yield compiler
    compiler.close()
