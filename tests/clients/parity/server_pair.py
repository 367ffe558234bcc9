"""The reference, a real Triton server, and our server with copies of the same models.

The reference may end by itself. The test that it answers then fails with the end of the
reference's log, and the next test gets two new servers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from exchange import wait_ready
from served import Served, free_ports

MAX_DEATHS = 2
"""Deaths of the reference after which a pair starts no further reference."""

_MODELS = Path(__file__).parent / "models"
_LOG_LINES = 30
_STOP_S = 60.0
_DEATH_S = 2.0
"""Time in which a process ends that has closed its connections."""


class ReferenceEndedError(Exception):
    """The reference ended by itself: answers of our server were compared with nothing."""


@dataclass(frozen=True)
class Ports:
    """The ports of one server."""

    http: int
    grpc: int


class Reference:
    """The Triton server in the wheel of nvidia-pytriton. A context manager."""

    def __init__(self, triton: Path, repository: Path, log: Path, flags: Sequence[str]) -> None:
        """``triton`` is the folder of the unpacked wheel."""
        http, grpc, metrics = free_ports(3)
        self.ports = Ports(http, grpc)
        self._log = log
        server = triton / "pytriton" / "tritonserver"
        command = [
            str(server / "bin" / "tritonserver"), "--model-repository", str(repository),
            "--backend-directory", str(server / "backends"), "--disable-auto-complete-config",
            "--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics),
            *flags,
        ]  # fmt: skip
        env = {**os.environ, "LD_LIBRARY_PATH": str(triton / "nvidia_pytriton.libs")}
        env["PATH"] = f"{triton / 'python' / 'bin'}:{env['PATH']}"
        env.pop("PYTHONPATH", None)
        with log.open("wb") as out:
            # The processes of its Python models are in its group, and outlive its death.
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def __enter__(self) -> Reference:
        try:
            wait_ready(self.ports.http)
        except TimeoutError:
            self.check()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def check(self, within_s: float = 0.0) -> None:
        """Raise if the process has ended, or ends within this time.

        Raises:
            ReferenceEndedError: names the exit code, with the last lines of the log.
        """
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        lines = self._log.read_text(errors="backslashreplace").splitlines()[-_LOG_LINES:]
        raise ReferenceEndedError(
            f"the reference, tritonserver of nvidia-pytriton, ended {how}. Its log ends:\n  "
            + "\n  ".join(lines)
        )


class ServerPair:
    """Both servers, started at the first use. A context manager."""

    def __init__(self, triton: Path, folder: Path, flags: Sequence[str]) -> None:
        self._triton, self._folder, self._flags = triton, folder, flags
        self._started = contextlib.ExitStack()
        self._num_starts = 0
        self.reference: Reference | None = None
        self._ports: tuple[Ports, Ports] | None = None

    def __enter__(self) -> ServerPair:
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    def ports(self) -> tuple[Ports, Ports]:
        """The ports of the reference and of our server. After the death of a reference both
        are new: their states must be equal.

        Raises:
            ReferenceEndedError: the reference has ended too often.
        """
        if self.reference is not None:
            try:
                self.reference.check()
            except ReferenceEndedError:
                self._started.close()
                self._ports = None
                if self._num_starts > MAX_DEATHS:
                    raise
        if self._ports is None:
            try:
                self._ports = self._start()
            except BaseException:
                self._started.close()
                raise
        return self._ports

    @contextlib.contextmanager
    def compared(self) -> Iterator[tuple[Ports, Ports]]:
        """The ports for a block of comparisons; an error of the block gives way to a death of
        the reference that explains the error.

        Raises:
            ReferenceEndedError: the reference ended during the block.
        """
        ports = self.ports()
        assert self.reference is not None
        try:
            yield ports
        except Exception as error:
            try:
                self.reference.check(_DEATH_S)
            except ReferenceEndedError as death:
                raise death from error
            raise
        self.reference.check()

    def _start(self) -> tuple[Ports, Ports]:
        self._num_starts += 1
        folder = self._folder / str(self._num_starts)
        for name in ("reference", "ours"):
            shutil.copytree(_MODELS, folder / name)
        log = folder / "reference.log"
        self.reference = self._started.enter_context(
            Reference(self._triton, folder / "reference", log, self._flags)
        )
        # Triton 2.51 always takes memory of clients.
        own = (*self._flags, "--allow-client-shm", "true")
        served = Served(folder / "ours", flags=own, log_path=folder / "ours.log")
        self._started.enter_context(served)
        return self.reference.ports, Ports(served.http_port, served.grpc_port)
