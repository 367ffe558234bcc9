"""`trimaran doctor`: what will and won't work on this machine, and why."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from trimaran.comm.errors import ConfigError
from trimaran.launcher import mpi_launch, preflight
from trimaran.launcher.config import MpiConfig
from trimaran.launcher.gpus import num_visible_gpus, torch_is_cpu_only
from trimaran.launcher.preflight import Endpoint
from trimaran.launcher.run_dir import RunDir

_MIN_PYTHON = (3, 10)
_PACKAGES = (
    "mpi4py", "torch", "tritonclient", "grpcio", "aiohttp", "uvloop", "msgpack", "numpy",
    "safetensors", "tokenizers", "transformers",
)  # fmt: skip
_MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``bad`` means that serving cannot work."""

    grade: str
    """``ok``, ``note`` or ``bad``."""

    subject: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `trimaran doctor`."""
    parser.add_argument("--mpirun", default="", metavar="PATH", help="mpirun to examine")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        parser.add_argument(f"--{name}-port", type=int, default=port, metavar="P",
                            help="port to look at (%(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if `trimaran serve` can work here, else 1."""
    findings: list[Finding] = []
    for examine in (
        _python,
        _packages,
        _programs,
        _mpi,
        _devices,
        _kernels,
        _memory,
        _folders,
        _ports,
    ):
        for finding in examine(args):
            print(f"{_MARKS[finding.grade]} {finding.subject:<14} {finding.text}", flush=True)
            findings.append(finding)
    num_bad = sum(finding.grade == "bad" for finding in findings)
    if num_bad:
        print(f"\n{num_bad} thing(s) to mend before `trimaran serve` can work here.")
        return 1
    print("\n`trimaran serve` can work here.")
    return 0


def _python(args: argparse.Namespace) -> Iterator[Finding]:
    text = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info < _MIN_PYTHON:
        yield Finding("bad", "python", f"{text}; 3.10 or newer is needed")
    else:
        yield Finding("ok", "python", text)


def _packages(args: argparse.Namespace) -> Iterator[Finding]:
    missing = []
    for name in _PACKAGES:
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        text = f"not installed: {', '.join(missing)}. pip install -e . installs them"
        yield Finding("bad", "packages", text)
    if "torch" not in missing:
        build = "CPU build" if torch_is_cpu_only() else "GPU build"
        yield Finding("ok", "torch", f"{version('torch')} ({build})")


def _programs(args: argparse.Namespace) -> Iterator[Finding]:
    from trimaran.launcher.group_specs import Programs

    yield from _tried("programs", lambda: " ".join(Programs.installed().rank))


def _mpi(args: argparse.Namespace) -> Iterator[Finding]:
    try:
        mpi = mpi_launch.find_mpi(MpiConfig(mpirun=args.mpirun))
        yield Finding("ok", "mpirun", str(mpi))
        yield Finding("ok", "MPI library", mpi_launch.check_library(mpi).split(",")[0])
    except ConfigError as error:
        yield Finding("bad", "MPI", str(error))
    if "SLURM_JOB_ID" in os.environ:
        job = os.environ["SLURM_JOB_ID"]
        yield Finding("note", "Slurm", f"inside job {job}: mpirun uses its allocation")


def _devices(args: argparse.Namespace) -> Iterator[Finding]:
    num_gpus = num_visible_gpus()
    cores = len(os.sched_getaffinity(0))
    yield Finding("ok", "CPU", f"{cores} cores usable, {mpi_launch.num_slots()} MPI slots")
    if num_gpus and torch_is_cpu_only():
        text = f"{num_gpus} visible, but this torch is a CPU build: models run on the CPU"
        yield Finding("note", "GPU", text)
    elif num_gpus:
        yield Finding("ok", "GPU", f"{num_gpus} visible: world sizes up to {num_gpus}")
    else:
        yield Finding("note", "GPU", "none visible: models run on the CPU")


def _memory(args: argparse.Namespace) -> Iterator[Finding]:
    def examine() -> str:
        preflight.check_shared_memory(1)
        free = shutil.disk_usage(preflight.SHARED_MEMORY).free
        ranks = free // preflight.SHARED_MEMORY_BYTES_PER_RANK
        return f"{preflight.SHARED_MEMORY} has {free >> 20} MiB free, enough for {ranks} ranks"

    yield from _tried("shared memory", examine)


def _folders(args: argparse.Namespace) -> Iterator[Finding]:
    def examine() -> str:
        run_dir = RunDir()
        run_dir.remove()
        return f"sockets go below {run_dir.path.parent}"

    yield from _tried("run folder", examine)


def _kernels(args: argparse.Namespace) -> Iterator[Finding]:
    from trimaran.kernels.build import KernelsUnavailableError, load_library

    try:
        load_library()
        yield Finding("ok", "CPU kernels", "compiled for this processor")
    except KernelsUnavailableError as error:
        reason = str(error).partition("\n")[0]
        yield Finding("note", "CPU kernels", f"none, torch is used: {reason}")


def _ports(args: argparse.Namespace) -> Iterator[Finding]:
    for name in ("http", "grpc", "metrics"):
        endpoint = Endpoint(name, "0.0.0.0", getattr(args, f"{name}_port"))

        def examine(endpoint: Endpoint = endpoint) -> str:
            preflight.check_ports([endpoint])
            return f"{endpoint.port} is free"

        for finding in _tried(f"{name} port", examine):
            # Another port mends this without touching the machine.
            grade = "note" if finding.grade == "bad" else finding.grade
            yield Finding(grade, finding.subject, finding.text)


def _tried(subject: str, examine: Callable[[], str]) -> Iterator[Finding]:
    try:
        yield Finding("ok", subject, examine())
    except ConfigError as error:
        yield Finding("bad", subject, str(error))
