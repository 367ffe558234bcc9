"""Runs the jobs behind the tables of an 8B shape and of Mixtral, side by side on a host's GPUs.

    python benchmarks/tables.py --gpus 4 --folder results
    python benchmarks/tables.py --folder results --jobs offline-short kernels --seconds 300

Each job has its number of GPUs, and a proportional share of the processor's cores. A job that
needs more GPUs than are free waits, and later jobs may start first. ``FOLDER/NAME`` has a job's
log and its result lines. ``--seconds`` bounds the whole run: at the limit running jobs are
ended, and waiting jobs are skipped. Exit code 1 if a job failed, was ended or skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.bench.results import machine

HERE = Path(__file__).resolve().parent
TRIMARAN = str(Path(sys.executable).with_name("trimaran"))
_POLL_S = 0.2
_GRACE_S = 8.0


@dataclass(frozen=True, slots=True)
class Job:
    """A command, without the flag that names the file of its result lines."""

    num_gpus: int
    command: tuple[str, ...]
    output: str
    """The flag for result lines."""


def _script(name: str, num_gpus: int, *flags: str) -> Job:
    return Job(num_gpus, (sys.executable, str(HERE / name), *flags), "--json")


def _offline(shape: str, *loads: str, kv_host_gib: int = 0) -> Job:
    flags = [word for load in loads for word in ("--load", load)]
    if kv_host_gib:
        flags += ["--kv-host-gib", str(kv_host_gib)]
    command = (TRIMARAN, "bench", "throughput", "--shape", shape, *flags)
    return Job(1, command, "--output")


def _layout(shape: str, layout: str, num_gpus: int, *loads: str) -> Job:
    flags = [word for load in loads for word in ("--load", load)]
    return _script("scaling.py", num_gpus, "--shape", shape, "--layouts", layout, *flags)


_SINGLE = ("128/256x1", "128/256x64")
_FOUR = ("128/128x4096", *_SINGLE)
_MIXTURE = ("128/128x1024", "1000/1000x192", "2048/128x192", "128/256x1")
JOBS = {
    "mixtral": _offline("mixtral", *_MIXTURE, kv_host_gib=16),
    "stress": _script(
        "engine_stress.py", 1, "--shape", "llama8b", "--seconds", "300", "--max-seq-len", "2048"
    ),
    "offline-1000": _offline("llama8b", "1000/1000x768"),
    "offline-long": _offline("llama8b", "128/2048x512", kv_host_gib=32),
    "offline-467": _offline("llama8b", "467/256x500"),
    "offline-2048": _offline("llama8b", "2048/128x768"),
    "offline-short": _offline("llama8b", *_SINGLE, "128/256x256", "128/128x4096"),
    "online-http": _script("online.py", 1, "--shape", "llama8b", "--protocols", "http"),
    "online-grpc": _script("online.py", 1, "--shape", "llama8b", "--protocols", "grpc"),
    "kernels": Job(1, (TRIMARAN, "bench", "kernels", "--shape", "llama8b"), "--output"),
    "start": _script("start_time.py", 1, "--shape", "llama8b"),
    "mixtral-tp2": _layout("mixtral", "tp2", 2, *_MIXTURE),
    "mixtral-ep2": _layout("mixtral", "tp2ep2", 2, *_MIXTURE),
    "tp2": _layout("llama8b", "tp2", 2, *_FOUR),
    "pp2": _layout("llama8b", "pp2", 2, *_FOUR, "--max-num-seqs", "2048"),
    "tp4": _layout("llama8b", "tp4", 4, *_FOUR, "--max-num-seqs", "4096"),
    "tp2pp2": _layout("llama8b", "tp2pp2", 4, *_FOUR, "--max-num-seqs", "4096"),
    "dp4": _layout("llama8b", "dp4", 4, *_FOUR),
}
"""The longest first, then those of several GPUs."""


class Running:
    """A job on its GPUs."""

    def __init__(self, name: str, gpus: list[int], num_gpus: int, folder: Path) -> None:
        job = JOBS[name]
        self.name, self.gpus = name, gpus
        self.begin = time.monotonic()
        own = folder / name
        own.mkdir(parents=True, exist_ok=True)
        cores = _cores(gpus, num_gpus)
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        with (own / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*job.command, job.output, str(own / f"{name}.jsonl")],
                stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            )  # fmt: skip
        # All its processes inherit them.
        os.sched_setaffinity(self._process.pid, cores)

    def code(self) -> int | None:
        """The exit code, if the job has ended."""
        return self._process.poll()

    def end(self) -> None:
        """End the job and all its processes."""
        for number, seconds in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, number)
                self._process.wait(seconds)


def _cores(gpus: list[int], num_gpus: int) -> set[int]:
    """The share of a job's GPUs of the cores that this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    share = max(len(allowed) // num_gpus, 1)
    chosen = {core for gpu in gpus for core in allowed[gpu * share : (gpu + 1) * share]}
    return chosen or set(allowed)


class Host:
    """The GPUs of this host, and the jobs on them."""

    def __init__(self, num_gpus: int, folder: Path) -> None:
        self._num_gpus, self._folder = num_gpus, folder
        self._free = set(range(num_gpus))
        self._running: list[Running] = []
        self._begin = time.monotonic()
        self.failed: list[str] = []

    def run(self, names: list[str], seconds: float) -> None:
        """Run the jobs within the time limit."""
        waiting = list(names)
        try:
            while waiting or self._running:
                if time.monotonic() - self._begin > seconds:
                    break
                self._reap()
                for name in [n for n in waiting if self._start(n)]:
                    waiting.remove(name)
                time.sleep(_POLL_S)
        finally:
            for job in self._running:
                job.end()
                self._fail(job.name, "was ended")
            for name in waiting:
                self._fail(name, "was left out")

    def _start(self, name: str) -> bool:
        """Start a job if enough GPUs are free."""
        count = JOBS[name].num_gpus
        if count > len(self._free):
            return False
        gpus = sorted(self._free)[:count]
        self._free -= set(gpus)
        self._running.append(Running(name, gpus, self._num_gpus, self._folder))
        self._say(f"{name} on GPU {', '.join(map(str, gpus))}")
        return True

    def _reap(self) -> None:
        """Free the GPUs of ended jobs."""
        for job in [job for job in self._running if job.code() is not None]:
            self._running.remove(job)
            self._free |= set(job.gpus)
            self._say(f"{job.name} took {time.monotonic() - job.begin:.0f} s")
            if job.code():
                self._fail(job.name, f"ended with {job.code()}")

    def _fail(self, name: str, why: str) -> None:
        self.failed.append(name)
        self._say(f"{name} {why}")

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begin:7.1f}] {text}", flush=True)


def main() -> int:
    """Run the chosen jobs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Any = parser.add_argument
    add("--gpus", type=int, default=1, metavar="N", help="of this host (1)")
    add("--folder", type=Path, required=True, help="for logs and result lines")
    add("--jobs", nargs="+", choices=JOBS, metavar="NAME", help=f"of {', '.join(JOBS)}")
    add("--seconds", type=float, default=float("inf"), metavar="S", help="for all (no bound)")
    args = parser.parse_args()
    if (there := len(machine.gpus())) < args.gpus:
        parser.error(f"--gpus is {args.gpus} but nvidia-smi tells of {there} here: name fewer")
    names = args.jobs or [name for name, job in JOBS.items() if job.num_gpus <= args.gpus]
    if large := [name for name in names if JOBS[name].num_gpus > args.gpus]:
        parser.error(f"--gpus is {args.gpus}, too few for {', '.join(large)}: leave them out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    host = Host(args.gpus, args.folder)
    host.run(names, args.seconds)
    return int(bool(host.failed))


if __name__ == "__main__":
    sys.exit(main())
