"""A server as a batch job: submitted, queried and stopped by the commands of users."""

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

OURS = ("trimaran", "trimaran-rank", "trimaran-frontend", "trimaran-rank1")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
BODY = {"text_input": "It was", "bad_words": "", "stop_words": ""}


class BatchJob:
    """One submission; ``ids`` are its array tasks, or the job alone."""

    def __init__(self, lab: SlurmLab, log_dir: Path) -> None:
        self.lab = lab
        self.log_dir = log_dir
        self.job_id = ""
        self.output = ""
        self.http_port = 0
        self._answers: list[str] = []
        self._state: dict[str, str] = {}

    def submit(self, template: str, repository: Path, *flags: str, wait: bool = True) -> None:
        """`trimaran slurm submit`, which returns when the server is ready."""
        done = self.trimaran(
            "slurm", "submit", *self._flags(template, repository),
            "--wait", "150" if wait else "0", *flags,
        )  # fmt: skip
        self.output = done.stdout
        found = re.search(r"Job (\d+) is submitted", done.stdout)
        if found:
            self.job_id = found[1]
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.log()}"

    def submit_without_container(self, template: str, repository: Path, *flags: str) -> None:
        """Submit a script that was rendered for a container, without its container options.

        Pyxis is not installed here; the remaining script is the step in which the whole server
        runs.
        """
        flags = (*flags, "--container-image", "trimaran.sqsh")
        done = self.trimaran("slurm", "render", *self._flags(template, repository), *flags)
        assert done.returncode == 0, done.stderr
        options = " --container-image=trimaran.sqsh", " --no-container-mount-home"
        assert all(option in done.stdout for option in options)
        script = done.stdout.replace(options[0], "").replace(options[1], "")
        self.log_dir.mkdir(parents=True)
        submitted = self.lab.run("sbatch", "--parsable", text=script)
        assert submitted.returncode == 0, submitted.stderr
        self.job_id = submitted.stdout.strip()
        self.wait_ready()

    def _flags(self, template: str, repository: Path) -> list[str]:
        self.http_port, grpc_port, metrics_port = free_ports(3)
        return [
            "--template", template, "--model-repo", str(repository),
            "--log-dir", str(self.log_dir), "--http-port", str(self.http_port),
            "--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port),
            "--setup", f"export PATH={BIN}:$PATH OMP_NUM_THREADS=1", "--drain-seconds", "40",
        ]  # fmt: skip

    def trimaran(self, *words: str) -> Any:
        """Run the `trimaran` command against the cluster."""
        return self.lab.run(str(BIN / "trimaran"), *words, timeout_s=200)

    def ask(self, max_tokens: int = 8, model: str = "ensemble", port: int = 0) -> str:
        """The job's own answer to curl."""
        url = f"http://127.0.0.1:{port or self.http_port}/v2/models/{model}/generate"
        body = json.dumps({**BODY, "max_tokens": max_tokens})
        done = self.lab.run("curl", "-sS", "--fail", "--max-time", "100", "-d", body, url)
        self._answers.append(f"$ curl -d '{body}' {url}\n{(done.stdout or done.stderr)[:250]}")
        assert done.returncode == 0, f"{done.stderr}\n{self.log()}"
        return str(json.loads(done.stdout)["text_output"])

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

    def wait_log(self, words: str, timeout_s: float = 60) -> None:
        """Wait until the job's output has this text."""
        deadline = time.monotonic() + timeout_s
        while words not in self.log():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def log(self) -> str:
        """The output of the job in all its files."""
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
                ids = environ.get("SLURM_JOB_ID"), environ.get("SLURM_ARRAY_JOB_ID")
                is_ours = environ.get("SLURM_CONF") == self.lab.env["SLURM_CONF"]
                # A server in a container does not see its job's number.
                if is_ours and (self.job_id in ids or ids == (None, None)):
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

    def cancel(self) -> dict[str, str]:
        """A plain scancel; returns Slurm's record of the job."""
        self.lab.run("scancel", self.job_id)
        self._state = self.lab.wait_state(self.job_id, *OVER)
        self.wait_gone(OURS)
        return self._state

    def show(self) -> None:
        """Print the job's answers, its output, and its end."""
        print(
            self.output,
            *self._answers[:2],
            *self._answers[2:][-1:],
            *self.rank_logs(),
            sep="\n",
        )
        print(*self.log().splitlines()[-20:], sep="\n")
        print({name: self._state[name] for name in ("JobState", "Reason", "ExitCode")})

    def wait_gone(self, names: Sequence[str], timeout_s: float = 30) -> None:
        """Wait until none of the job's processes runs."""
        deadline = time.monotonic() + timeout_s
        while left := self.processes(*names):
            assert time.monotonic() < deadline, left
            time.sleep(0.2)


class LongRequest(threading.Thread):
    """A stream that is under way while something happens to its server."""

    def __init__(self, job: BatchJob, max_tokens: int = 800, model: str = "ensemble") -> None:
        super().__init__(daemon=True)
        self._url = f"http://127.0.0.1:{job.http_port}/v2/models/{model}/generate_stream"
        self._body = {**BODY, "max_tokens": max_tokens, "stream": True}
        self._begun = threading.Event()
        self.text = BODY["text_input"]
        self.error = ""
        self.start()
        assert self._begun.wait(100) and not self.error, self.error

    def run(self) -> None:
        request = urllib.request.Request(self._url, data=json.dumps(self._body).encode())
        try:
            with urllib.request.urlopen(request, timeout=100) as reply:
                for line in reply:
                    if line.startswith(b"data: "):
                        self._take(json.loads(line[len(b"data: ") :]))
        except OSError as error:
            self.error = repr(error)
        finally:
            self._begun.set()

    def _take(self, event: dict[str, str]) -> None:
        self.error = event.get("error", "")
        self.text += event.get("text_output", "")
        self._begun.set()

    def finish(self) -> str:
        """The whole answer, like that of `BatchJob.ask`."""
        self.join(120)
        assert not self.is_alive() and not self.error, self.error
        return self.text
