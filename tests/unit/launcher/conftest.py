"""A supervisor over small real children, watched from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import is_alive
from trimaran.bench.serving.free_ports import free_ports

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from forked_process import ForkedProcess  # noqa: E402
from supervise import run as run_supervisor  # noqa: E402

DEADLINE_S = 100.0


class Supervised:
    """One running supervisor and every process that was ever seen among its descendants."""

    def __init__(self, folder: Path, behaviour: str, settings: dict[str, Any]) -> None:
        self.log_path = folder / "log"
        self.seen: dict[int, psutil.Process] = {}
        env = {**os.environ, "TEST_BEHAVIOUR": behaviour, "TMPDIR": str(folder)}
        env.pop("XDG_RUNTIME_DIR", None)
        env["TEST_TOLD_SIZE"] = str(settings.pop("told_size", settings.get("world_size", 1)))
        if settings.pop("has_helper", False):
            env["TEST_HELPER"] = "1"
        output = settings.pop("stderr", self.log_path)
        stdout = settings.pop("stdout", None)
        self.process: ForkedProcess | subprocess.Popen[bytes]
        if stdout is None:
            Path(output).touch()
            self.process = ForkedProcess(run_supervisor, (settings,), env, output)
            return
        with open(output, "ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(HERE / "supervise.py"), json.dumps(settings)],
                stdout=stdout,
                stderr=stream,
                stdin=subprocess.DEVNULL,
                env=env,
            )

    @property
    def log(self) -> str:
        """The log so far."""
        return self.log_path.read_text() if self.log_path.exists() else ""

    def wait_for(self, pattern: str, count: int = 1) -> re.Match[str]:
        """Wait until the log holds ``count`` matches; the last one."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self.look()
            found = list(re.finditer(pattern, self.log))
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} is not in the log {count} times:\n{self.log}")

    def wait_ready(self) -> None:
        """Wait for the line that ends a start."""
        self.wait_for(r"curl -X POST .*\n")
        self.look()

    def look(self) -> None:
        """Note the processes that are there now."""
        try:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.seen[process.pid] = process
        except psutil.NoSuchProcess:
            pass

    def pid_of(self, pattern: str) -> int:
        """The process id that the last match of the log names."""
        return int(re.findall(pattern, self.log)[-1])

    def end(self) -> int:
        """The exit code, once the supervisor has ended by itself."""
        self.look()
        return self.process.wait(DEADLINE_S)

    def terminate(self, number: int = signal.SIGTERM) -> int:
        """Signal the supervisor; its exit code."""
        self.look()
        self.process.send_signal(number)
        return self.end()

    def survivors(self, deadline_s: float = 60.0) -> list[psutil.Process]:
        """Processes below the supervisor that still run after that time."""
        deadline = time.monotonic() + deadline_s
        left = list(self.seen.values())
        while left and time.monotonic() < deadline:
            left = [process for process in left if is_alive(process)]
            time.sleep(0.02)
        return left


@pytest.fixture
def free_port() -> int:
    """A port without a listener, outside of the ephemeral range."""
    return free_ports(1)[0]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    """Start supervisors; their remaining processes are killed at the end of the test."""
    started: list[Supervised] = []
    starter = tmp_path / "starter"
    program = HERE / "starter_program.py"
    starter.write_text(f'#!/bin/sh\nexec {sys.executable} -P {program} "$@"\n')
    starter.chmod(0o755)

    def start(behaviour: str = "", **settings: Any) -> Supervised:
        if settings.get("world_size", 1) > 1:
            settings["starter"] = str(starter)
        started.append(Supervised(tmp_path, behaviour, settings))
        return started[-1]

    yield start
    for each in started:
        each.look()
        for process in [*each.seen.values()]:
            if process.is_running():
                process.kill()
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()
