"""A real `trimaran serve` with its whole process tree, for end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families
from waiting import started, wait_until

from tests.processes import is_alive
from trimaran.bench.serving.free_ports import free_ports
from trimaran.launcher.cli.main import main

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "examples" / "demo_models" / "base"
DEMO_MOE = ROOT / "examples" / "demo_models" / "moe"


def command_env() -> dict[str, str]:
    """The environment of a shell that has not activated the virtual environment."""
    # Variables of a surrounding MPI job; a machine's own Open MPI settings stay.
    job = ("OMPI_COMM_", "OMPI_UNIVERSE_", "PMIX_", "PRTE_", "PMI_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(job)}
    env.pop("PYTHONUNBUFFERED", None)
    env["OMP_NUM_THREADS"] = "1"
    return env


def run_trimaran(*args: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the `trimaran` command to its end."""
    return subprocess.run(
        [str(BIN / "trimaran"), *args],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=command_env(),
        cwd="/",
    )


def init_repo(*args: str) -> None:
    """Write a repository as `trimaran init-repo` does, in this process."""
    assert main(["init-repo", *args]) == 0


@dataclass
class Served:
    """One running server. A context manager: all its processes end with the block."""

    repository: Path
    world_size: int = 1
    flags: tuple[str, ...] = ()
    log_path: Path = Path("serve.log")
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0
    address: str = "127.0.0.1"
    """The address of its ports from here."""

    process: subprocess.Popen[bytes] = field(init=False)
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    def __enter__(self) -> Served:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the supervisor in a session of its own."""
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        command = [
            str(BIN / "trimaran"), "serve",
            "--world-size", str(self.world_size), "--model-repo", str(self.repository),
            "--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port),
            "--metrics-port", str(self.metrics_port), *self.flags,
        ]  # fmt: skip
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=command_env(),
                cwd="/",
            )
        started.append(self)

    def wait_ready(self, timeout_s: float = 180) -> None:
        """Return when the server answers ready; fail with its log otherwise."""
        self.wait_until(self.is_ready, "ready", timeout_s)
        self.record_tree()

    def wait_log(self, text: str, count: int = 1, timeout_s: float = 120) -> None:
        """Wait until the log holds ``text`` this many times."""
        self.wait_until(
            lambda: self.log().count(text) >= count, f"{count} x {text!r} in the log", timeout_s
        )

    def wait_until(
        self, is_done: Callable[[], bool], what: str, timeout_s: float = 120
    ) -> None:
        """Wait for an effect of the server; fail with its log, at once if the server has
        ended."""

        def ended() -> str:
            code = self.process.poll()
            return "" if code is None else f"the server ended with {code}"

        wait_until(is_done, what, timeout_s, ended=ended, told=self.log)

    def is_ready(self) -> bool:
        """Whether /v2/health/ready answers 200 now."""
        try:
            with urllib.request.urlopen(self.url("/v2/health/ready"), timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def log(self) -> str:
        """Everything the command wrote so far, if that was to a file."""
        if not self.log_path.is_file():
            return f"(its log went to {self.log_path})"
        return self.log_path.read_text(errors="replace")

    def url(self, path: str) -> str:
        """A URL on the HTTP port."""
        return f"http://{self.address}:{self.http_port}{path}"

    def post(self, path: str, body: Any, timeout_s: float = 60) -> tuple[int, Any]:
        """POST JSON; return status and decoded JSON, errors included; None: no content."""
        request = urllib.request.Request(self.url(path), data=json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                content = reply.read()
                return reply.status, json.loads(content) if content else None
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def get(self, path: str) -> Any:
        """GET JSON."""
        with urllib.request.urlopen(self.url(path), timeout=120) as reply:
            return json.load(reply)

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of every sample of this name on the metrics endpoint."""
        url = f"http://{self.address}:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=120) as reply:
            families = text_string_to_metric_families(reply.read().decode())
            return [
                (sample.labels, sample.value)
                for family in families
                for sample in family.samples
                # The parser names counters as OpenMetrics does.
                if sample.name in (name, f"{name}_total")
            ]

    def metric(self, name: str, **labels: str) -> float:
        """The value of the only sample with these labels."""
        (value,) = [
            value for found, value in self.samples(name) if labels.items() <= found.items()
        ]
        return value

    def events(self, path: str, body: Any, timeout_s: float = 60) -> list[dict[str, Any]]:
        """POST to a stream route; return its events in order."""
        request = urllib.request.Request(self.url(path), data=json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            text = reply.read().decode()
        return [json.loads(event[len("data: ") :]) for event in text.split("\n\n") if event]

    def record_tree(self) -> dict[int, psutil.Process]:
        """Record every process of the tree, to find orphans later."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            for process in [root, *root.children(recursive=True)]:
                self.seen[process.pid] = process
        return self.seen

    def survivors(self) -> list[psutil.Process]:
        """Noted processes that still run."""
        return [process for process in self.seen.values() if is_alive(process)]

    def wait_gone(self, timeout_s: float) -> None:
        """Wait until no noted process runs; fail with the running processes and the log."""

        def are_gone() -> bool:
            self.process.poll()
            return not self.survivors()

        wait_until(
            are_gone,
            "end of the tree",
            timeout_s,
            told=lambda: f"{self.survivors()}\n{self.log()}",
        )

    def wait_ended(self, timeout_s: float = 40) -> int:
        """Wait until the command has ended; returns its exit code."""
        wait_until(
            lambda: self.process.poll() is not None,
            "end of the server",
            timeout_s,
            told=self.log,
        )
        return self.process.wait()

    def stop(self, timeout_s: float = 40) -> int:
        """SIGTERM, wait, and make sure that the whole tree is gone; the exit code."""
        self.record_tree()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.wait_ended(timeout_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the remaining processes of the tree, by pid."""
        self.record_tree()
        for process in self.survivors():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


class InJob(Served):
    """A server whose tasks are started by a separate mpirun."""

    def start(self) -> None:
        """Every task runs the same command line."""
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        command = [
            str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
            "-n", str(self.world_size), str(BIN / "trimaran"), "serve",
            "--model-repo", str(self.repository), "--http-port", str(self.http_port),
            "--grpc-port", str(self.grpc_port), "--metrics-port", str(self.metrics_port),
            *self.flags,
        ]  # fmt: skip
        env = {**command_env(), "OMPI_ALLOW_RUN_AS_ROOT": "1"}
        env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        # A killed mpirun leaves its folder, which fails a later mpirun with the same pid.
        env["PRTE_MCA_prte_local_tmpdir_base"] = str(self.log_path.parent)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True, env=env, cwd="/",
            )  # fmt: skip
        started.append(self)
