"""A server as a batch job: submitted, asked and stopped by the commands that users have."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from lab import SlurmLab
from served import BIN, free_ports

BODY = {"text_input": "It was", "bad_words": "", "stop_words": ""}


class BatchJob:
    """One submission; ``ids`` are its array tasks, or the job alone."""

    def __init__(self, lab: SlurmLab, log_dir: Path) -> None:
        self.lab = lab
        self.log_dir = log_dir
        self.job_id = ""
        self.output = ""
        self.http_port = 0

    def submit(self, template: str, repository: Path, *flags: str, wait: bool = True) -> None:
        """`trimaran slurm submit`, which returns when the server is ready."""
        self.http_port, grpc_port, metrics_port = free_ports(3)
        done = self.trimaran(
            "slurm", "submit", "--template", template, "--model-repo", str(repository),
            "--log-dir", str(self.log_dir), "--http-port", str(self.http_port),
            "--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port),
            "--setup", f"export PATH={BIN}:$PATH OMP_NUM_THREADS=1",
            "--drain-seconds", "40", "--wait", "150" if wait else "0", *flags,
        )  # fmt: skip
        self.output = done.stdout
        found = re.search(r"Job (\d+) is submitted", done.stdout)
        if found:
            self.job_id = found[1]
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.log()}"

    def trimaran(self, *words: str) -> Any:
        """Run the `trimaran` command against the cluster."""
        return self.lab.run(str(BIN / "trimaran"), *words, timeout_s=200)

    def ask(self, max_tokens: int = 8, model: str = "ensemble", port: int = 0) -> str:
        """The job's own answer to a request."""
        return self._generate(model, {**BODY, "max_tokens": max_tokens}, port)

    def _generate(self, model: str, body: dict[str, Any], port: int = 0) -> str:
        url = f"http://127.0.0.1:{port or self.http_port}/v2/models/{model}/generate"
        request = urllib.request.Request(url, data=json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=100) as reply:
            return str(json.load(reply)["text_output"])

    def is_ready(self) -> bool:
        """Whether the server says so."""
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{self.http_port}/v2/health/ready"
            with urllib.request.urlopen(url, timeout=5) as reply:
                return bool(reply.status == 200)
        return False

    def wait_ready(self, timeout_s: float = 120) -> None:
        """Wait until the server answers again."""
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.3)

    def log(self) -> str:
        """What the job wrote, all its files."""
        texts = [p.read_text(errors="replace") for p in sorted(self.log_dir.glob("*.log"))]
        return "\n".join(texts)

    def rank_logs(self) -> list[str]:
        """Names of the files that ranks wrote."""
        return sorted(path.name for path in self.log_dir.glob("*/*rank*.log"))

    def processes(self, *names: str) -> list[psutil.Process]:
        """Processes of this job by program name, on all nodes."""
        found = []
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                environ = process.environ() if process.info["name"] in names else {}
                if (
                    environ.get("SLURM_JOB_ID") == self.job_id
                    and environ.get("SLURM_CONF") == self.lab.env["SLURM_CONF"]
                ):
                    found.append(process)
        return found

    def processes_of(self, group: str, name: str) -> list[psutil.Process]:
        """Processes of one group by program name, the oldest first."""
        found = self.processes(name)
        return sorted(
            (p for p in found if p.environ().get("TRIMARAN_GROUP") == group),
            key=lambda process: process.pid,
        )

    def steps(self) -> list[str]:
        """The job's running steps, the batch script aside."""
        done = self.lab.run("squeue", "--steps", "-h", "-o", "%i", "-j", self.job_id)
        return [step for step in done.stdout.split() if step.partition(".")[2].isdigit()]

    def cancel(self) -> None:
        """A plain scancel."""
        if self.job_id:
            self.lab.run("scancel", self.job_id)

    def wait_gone(self, names: Sequence[str], timeout_s: float = 30) -> None:
        """Wait until none of the job's processes runs."""
        deadline = time.monotonic() + timeout_s
        while left := self.processes(*names):
            assert time.monotonic() < deadline, left
            time.sleep(0.2)


class LongRequest(threading.Thread):
    """A request that runs while something happens to its server."""

    def __init__(self, job: BatchJob, max_tokens: int = 800) -> None:
        super().__init__(daemon=True)
        self._job = job
        self._max_tokens = max_tokens
        self.text = ""
        self.error = ""
        self.start()
        time.sleep(0.5)

    def run(self) -> None:
        try:
            self.text = self._job.ask(self._max_tokens)
        except OSError as error:
            self.error = repr(error)

    def finish(self) -> str:
        """The whole answer."""
        self.join(120)
        assert not self.is_alive() and not self.error, self.error
        return self.text
