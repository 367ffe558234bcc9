"""A server under test whose processes and leftovers can all be found from outside."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from served import BIN, Served, command_env, free_ports
from shm import PrivateShm, Shm

MARK = "TRIMARAN_TEST_RUN"
_PROGRAMS = {
    "trimaran": "supervisor",
    "trimaran-frontend": "front end",
    "trimaran-orchestrator": "orchestrator",
    "trimaran-rank": "rank",
    "prterun": "starter",
    "mpirun": "starter",
    "srun": "starter",
    "prte": "daemon",
    "prted": "daemon",
}


@dataclass(frozen=True)
class Member:
    """One process of the server."""

    pid: int
    role: str
    """A value of ``_PROGRAMS``, or the program's name."""
    group: str
    """The group that it was started for; empty outside of one."""
    process: psutil.Process = field(compare=False, repr=False)


@dataclass
class ChaosServer(Served):
    """A server with a mark in its environment and its own /dev/shm and temporary folder.

    Leftovers are processes with the mark, files in the two folders, and listeners on its ports
    after the end.
    """

    multi_model: bool = True
    folder: Path = Path(".")
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    tmp: Path = Path(".")
    make_shm: Callable[[], Shm] = PrivateShm
    shm: Shm | None = None

    def start(self) -> None:
        """Start the supervisor."""
        self.log_path = self.folder / "serve.log"
        # The folder holds sockets, whose paths are limited to 107 bytes.
        self.tmp = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.shm = self.make_shm()
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        ranks = (
            ["--multi-model"] if self.multi_model else ["--world-size", str(self.world_size)]
        )
        command = [
            *self.shm.prefix, str(BIN / "trimaran"), "serve", *ranks,
            "--model-repo", str(self.repository),
            "--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port),
            "--metrics-port", str(self.metrics_port), *self.flags,
        ]  # fmt: skip
        env = {**command_env(), MARK: self.mark, "TMPDIR": str(self.tmp)}
        env.pop("XDG_RUNTIME_DIR", None)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=env,
                cwd="/",
            )

    def end(self, timeout_s: float = 60) -> int:
        """SIGTERM and the exit code. Leftovers stay, for inspection."""
        self.process.terminate()
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """End the remaining processes of the server, and its namespace and folder."""
        for member in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                member.process.kill()
        super().kill()
        if self.shm is not None:
            self.shm.close()
            shutil.rmtree(self.tmp, ignore_errors=True)

    def members(self) -> list[Member]:
        """Every living process that carries the mark, by pid."""
        return sorted(_marked(self.mark), key=lambda member: member.pid)

    def find(self, role: str, group: str | None = None) -> list[Member]:
        """The members of one role, of one group or of all."""
        return [
            m for m in self.members() if m.role == role and (group is None or m.group == group)
        ]

    def is_model_ready(self, model: str) -> bool:
        """Whether this model reports readiness."""
        path = f"/v2/models/{model}/ready"
        with contextlib.suppress(OSError), urllib.request.urlopen(self.url(path), timeout=5):
            return True
        return False

    def is_live(self) -> bool:
        """Whether the front end reports liveness."""
        with contextlib.suppress(OSError):
            url = self.url("/v2/health/live")
            with urllib.request.urlopen(url, timeout=5) as reply:
                return bool(reply.status == 200)
        return False

    def shm_files(self) -> list[str]:
        """Names in the server's /dev/shm."""
        assert self.shm is not None
        return self.shm.files()

    def temporary_files(self) -> list[str]:
        """Names in its temporary folder."""
        return sorted(path.name for path in self.tmp.iterdir())


def _marked(mark: str) -> Iterator[Member]:
    for process in psutil.process_iter():
        # A process that ends meanwhile, or a zombie, has no environment.
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                yield member_of(process)


def member_of(process: psutil.Process) -> Member:
    """The role of a living process in the server.

    Raises:
        psutil.Error: the process has ended.
    """
    group = process.environ().get("TRIMARAN_GROUP", "")
    return Member(process.pid, _role(process.cmdline()), group, process)


def _role(words: list[str]) -> str:
    """Scripts run as ``python -P /path/of/script``, programs as themselves."""
    names = [os.path.basename(word) for word in words[:4]]
    return next((_PROGRAMS[n] for n in names if n in _PROGRAMS), names[0] if names else "")
